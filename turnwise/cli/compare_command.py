"""`turnwise compare RUN…`: results of runs side by side, the settings that differ, and the curves."""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.cli.options import writable_file
from turnwise.config.read.yaml_text import load_yaml, read_yaml
from turnwise.config.show.dump import RESUMED, leaves
from turnwise.errors import ConfigError, DataError, nearest
from turnwise.report.curve import compared_curves
from turnwise.report.picture_file import is_replaceable
from turnwise.report.series import counted
from turnwise.tracking.jsonl import read_metrics
from turnwise.tracking.metric_columns import AGENTIC_COLUMNS, SFT_COLUMNS, MetricColumn
from turnwise.tracking.pace import duration

_METRICS = (
    AGENTIC_COLUMNS.validation,
    AGENTIC_COLUMNS.trends[1],
    AGENTIC_COLUMNS.trends[0],
    SFT_COLUMNS.validation._replace(title="val loss"),
    SFT_COLUMNS.trends[0],
)
_HIGHER_IS_BETTER = ("success", "score", "reward", "accuracy")
_SEEDS = ("seed", "tag_seed")
"""Last parts of keys that only draw other tasks and tokens."""
_MAX_WIDTH = 24  # characters of a setting's value
_MAX_LABEL = 60
"""Most characters of a curve's label; more would cover the curves."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run, read from its folder."""

    path: Path
    rows: list[dict[str, float]]
    settings: Mapping[str, Any]

    def series(self, column: MetricColumn) -> list[tuple[float, float]]:
        """`(step, value)` of each step at which the metric has a finite value."""
        values = [(row["step"], column.read(row)) for row in self.rows]
        return [(step, value) for step, value in values if value is not None and math.isfinite(value)]

    @property
    def steps(self) -> str:
        """The number of trained steps, as in `30`, or `30 of 40` if 40 are planned."""
        num_steps = sum(_is_step(row) for row in self.rows)
        max_steps = self.settings.get("max_steps")
        if isinstance(max_steps, int) and num_steps < max_steps:
            return f"{num_steps} of {max_steps}"
        return str(num_steps)

    @property
    def seconds(self) -> float:
        """Wall time of all steps, in seconds. A step without `time/step_wall` counts as the sum of its
        phases."""
        return sum(row.get("time/step_wall") or _sum_of_phases(row) for row in self.rows)


def _sum_of_phases(row: Mapping[str, float]) -> float:
    return sum(
        value for name, value in row.items() if name.startswith("time/step_") and name != "time/step_total"
    )


def run(options: argparse.Namespace) -> int:
    """Prints a table of the runs and one of the settings that differ. With --out it also draws the curves."""
    out = _picture_file(options.out) if options.out else None
    runs = [read_run(folder) for path in options.runs for folder in _run_folders(Path(path))]
    columns = _columns(options.metric, runs)
    print(_table(list(_results(runs, columns))))
    differences = list(_differences(runs))
    if differences:
        header = ["", *(f"[{number}]" for number, _ in enumerate(runs, 1))]
        print("\nsettings that differ\n" + _table([header, *differences]))
    elif sum(bool(run.settings) for run in runs) > 1:
        print("\nthe runs have the same settings")
    if out is not None and columns:
        _draw(runs, columns, out)
        print(f"\ncurves: {out}")
    return 0


def _picture_file(path: str) -> Path:
    """The file of --out. Raises ConfigError if no picture can be written there, or another file is there."""
    file = writable_file(path, "--out")
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--out {file}: a picture ends in .png, .pdf or .svg")
    if not is_replaceable(file):
        raise ConfigError(
            f"--out {file} already exists and isn't a picture that turnwise drew; name another file"
        )
    return file


def _columns(metrics: Sequence[str], runs: Sequence[Run]) -> list[MetricColumn]:
    """The `metrics` that a run has, by default the usual ones. Raises DataError if no run has one of the
    `metrics`."""
    columns = [MetricColumn(name, "{:.4g}", name) for name in metrics] or list(_METRICS)
    columns = [column for column in columns if any(run.series(column) for run in runs)]
    names = [column.name for column in columns]
    for name in metrics:
        if name not in names:
            recorded = {metric for run in runs for row in run.rows for metric in row} - {"step"}
            raise DataError(
                f"--metric {name}: no run has it in metrics.jsonl.{nearest(name, sorted(recorded))} "
                "docs/metrics.md has all"
            )
    return columns


def _draw(runs: Sequence[Run], columns: Sequence[MetricColumn], out: Path) -> None:
    groups = _curve_groups(runs)
    panels: dict[str, Any] = {}
    for column in columns:
        panels[column.title] = {
            label: [counted(run.series(column), column.name) for run in group]
            for label, group in groups.items()
        }
    compared_curves(_without_copies(panels), out)


def _run_folders(path: Path) -> list[Path]:
    """The `path` itself if it is a run's folder, else the folders of all runs in it. Raises DataError if
    there are none."""
    if not path.is_dir():
        raise DataError(
            f"{path}: there is no such folder; compare takes run folders, output_dir/exp_name/<time>"
        )
    if (path / "metrics.jsonl").is_file():
        return [path]
    folders = sorted(file.parent for file in path.glob("*/metrics.jsonl"))
    if not folders:
        raise DataError(
            f"{path} isn't a run folder, as it holds no metrics.jsonl; a run's is output_dir/exp_name/<time>"
        )
    return folders


def read_run(path: Path) -> Run:
    """Reads a run's folder. Raises DataError if its metrics are damaged or missing. An unreadable config
    counts as empty."""
    try:
        rows = read_metrics(path / "metrics.jsonl")
        if any("step" not in row for row in rows):
            raise ValueError("a line has no step")
    except (OSError, ValueError, AttributeError) as fault:
        raise DataError(f"{path / 'metrics.jsonl'} is damaged ({fault}); remove this run") from fault
    if not rows:
        raise DataError(f"{path}: no step has ended there yet; remove this run, or wait")
    try:
        values = load_yaml(read_yaml(path / "config.yaml"), "config.yaml")
        settings = dict(leaves(values))
    except (ConfigError, AttributeError) as fault:
        reason = str(fault).splitlines()[0]
        print(
            f"note: {path / 'config.yaml'} can't be read ({reason}), so its settings aren't compared",
            file=sys.stderr,
        )
        settings = {}
    return Run(path, rows, settings)


def _results(runs: Sequence[Run], columns: Sequence[MetricColumn]) -> Iterator[list[str]]:
    """Yields a header, then a line per run: steps, final and best value of each metric, episodes, tokens and
    time."""
    titles = [f"{column.title} {value}" for column in columns for value in ("final", "best")]
    yield ["", "run", "steps", *titles, "episodes", "tokens", "time"]
    for number, run in enumerate(runs, 1):
        figures = [text for column in columns for text in _final_and_best(run, column)]
        episodes = max(row.get("system/samples", 0.0) for row in run.rows)
        tokens = sum(row.get("rollout/total_tokens", 0.0) for row in run.rows)
        yield [
            f"[{number}]",
            _name(run),
            run.steps,
            *figures,
            _count(episodes),
            _count(tokens),
            duration(run.seconds),
        ]


def _count(number: float) -> str:
    return f"{number:,.0f}" if number else "-"


def _final_and_best(run: Run, column: MetricColumn) -> tuple[str, str]:
    """The last and the best value. If every step has the metric, both are means over a tenth of the run, to
    average noise."""
    values = [value for _, value in run.series(column)]
    if not values:
        return "-", "-"
    num_steps = sum(_is_step(row) for row in run.rows)
    width = 1
    if len(values) >= num_steps:
        width = max(len(values) // 10, 1)
    starts = range(len(values) - width + 1)
    means = [sum(values[start : start + width]) / width for start in starts]
    return column.text(means[-1]), _best(column, means)


def _best(column: MetricColumn, means: Sequence[float]) -> str:
    """The highest mean of a success, score or reward, the lowest of a loss; "-" for a metric of which neither
    end is better."""
    if "loss" in column.name:
        return column.text(min(means))
    parts = column.name.split("/")
    if parts[-1] in _HIGHER_IS_BETTER or "score" in parts or "reward" in parts:
        return column.text(max(means))
    return "-"


def _is_step(row: Mapping[str, float]) -> bool:
    """Whether the row belongs to a training step. A run's last row may have only the final validation."""
    return "rollout/score/mean" in row or "sft/loss" in row or "actor/lr" in row


def _differences(runs: Sequence[Run]) -> Iterator[list[str]]:
    """Yields a line per setting in which runs differ: its key, and its value in each run ("?" if the run has
    no settings)."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    for key in keys:
        if key in RESUMED["places"]:
            continue
        values = [str(run.settings.get(key, "-")) if run.settings else "?" for run in runs]
        if len({*values} - {"?"}) > 1:
            yield [key, *map(_short, values)]


def _curve_groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Label → the runs of one curve: those whose settings differ in seeds only. A label names the settings
    that differ from other curves', or the runs themselves if none does or so many do that their names
    wouldn't fit into the picture."""
    differences = [line[0] for line in _differences(runs)]
    keys = [key for key in differences if _last_part(key) not in _SEEDS]
    differs_in_seed = len(keys) < len(differences)
    has_own_names = len({_name(run) for run in runs}) == len(runs)
    groups: dict[str, list[Run]] = {}
    for number, run in enumerate(runs, 1):
        settings = [f"{_last_part(key)}={_short(run.settings.get(key, '-'))}" for key in keys]
        label = ", ".join(settings)
        if not run.settings or (not label and has_own_names and not differs_in_seed):
            label = f"[{number}] {_name(run)}"
        groups.setdefault(label or "all runs", []).append(run)
    return {_short_label(label, group, runs): group for label, group in groups.items()}


def _short_label(label: str, group: Sequence[Run], runs: Sequence[Run]) -> str:
    """The label of a curve, or if that is long, the numbers of its runs in the printed table and the name of
    the first."""
    if len(label) <= _MAX_LABEL:
        return label
    members = {id(run) for run in group}
    numbers = [str(number) for number, run in enumerate(runs, 1) if id(run) in members]
    return f"[{', '.join(numbers)}] {_name(group[0])}"


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _short(value: Any) -> str:
    text = str(value)
    if len(text) <= _MAX_WIDTH:
        return text
    return f"{text[: _MAX_WIDTH - 1]}…"


def _without_copies(panels: dict[str, Any]) -> dict[str, Any]:
    """The panels without those that show the same curves as an earlier one, such as a score that is the
    success."""
    distinct: dict[str, Any] = {}
    for title, curves in panels.items():
        if curves not in distinct.values():
            distinct[title] = curves
    return distinct


def _name(run: Run) -> str:
    path = run.path.resolve()
    return f"{path.parent.name}/{path.name}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Aligns lines as columns, two spaces apart. The first column and columns with letters are aligned left,
    others right."""
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    formats = []
    for index, column in enumerate(columns):
        has_letters = any(map(str.isalpha, "".join(column[1:])))
        alignment = "<" if index == 0 or has_letters else ">"
        formats.append(f"{alignment}{widths[index]}")
    rows = []
    for line in lines:
        cells = map(format, line, formats)
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)
