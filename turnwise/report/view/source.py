"""What the pages show of one run, and how a step of it is made. The command line fills it in, since only it
reads configs, metrics and tokenizers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.report.view.episode_spans import SpansOfStep
from turnwise.report.view.rollouts_file import RolloutsFile, chosen_steps
from turnwise.report.view.scripts import script
from turnwise.report.view.step_data import Json, StepData, step_data
from turnwise.report.view.token_texts import TokenTexts

SHOWN_BYTES = 1_000_000_000
"""If a file is larger, every k-th step is shown unless steps are named."""
_DIGITS = 4


SpansOf = Callable[[int, bool], SpansOfStep]
"""The spans of a step, which counts from 0; the second argument says whether it is a validation."""


def no_spans(step: int, is_validation: bool) -> SpansOfStep:
    """No spans: for a run without traces."""
    return {}


@dataclass(slots=True)
class Episodes:
    """One file of episodes of a run. `kind` names it in links: `train`, `val` or `file`."""

    kind: str
    file: RolloutsFile
    first_step: int
    """What people call the file's step 0: training steps count from 1, and the validation before training is
    step 0."""
    chosen: Sequence[int] | None = None
    """The steps that are shown, as people count; None = all, or every k-th of a large file."""
    every: int = 1
    summaries: dict[int, Json] = field(default_factory=dict)

    def steps(self) -> list[int]:
        """The shown steps, as people count, in order."""
        if self.chosen is not None:
            return [step for step in self.chosen if step - self.first_step in self.file.steps]
        chosen, self.every = chosen_steps(self.file, SHOWN_BYTES)
        return [step + self.first_step for step in chosen]

    def read(self, step: int, texts: TokenTexts | None, spans: SpansOf = no_spans) -> StepData:
        """A step, as people count; its row for the index is kept."""
        number = step - self.first_step
        records, num_damaged = self.file.records(number)
        made = step_data(step, records, texts, num_damaged, spans(number, self.kind == "val"))
        self.summaries[step] = made.summary
        return made


@dataclass(slots=True)
class RunSource:
    """One run. `about` holds what isn't an episode: metrics by name, sentences about health, settings that
    differ from their defaults, checkpoints, notes."""

    name: str
    path: str
    episodes: list[Episodes]
    texts: TokenTexts | None
    about: Json = field(default_factory=dict)
    timeline: Json | None = None
    spans: SpansOf = no_spans
    """The spans of its traces."""

    def step_script(self, number: int, episodes: Episodes, step: int) -> bytes:
        """The script of a step of the run with this number among the shown ones."""
        made = episodes.read(step, self.texts, self.spans)
        return script("step", f"{number}/{episodes.kind}/{step}", made.data)

    def index_entry(self) -> Json:
        """The run's part of the index. Steps that weren't read yet have a row with their number only."""
        kinds = []
        for episodes in self.episodes:
            steps = episodes.steps()
            rows = [episodes.summaries.get(step, {"step": step}) for step in steps]
            kind: Json = {"kind": episodes.kind, "file": str(episodes.file.path), "steps": rows}
            kind["every"] = episodes.every
            kind["damaged"] = episodes.file.num_damaged
            kinds.append(kind)
        entry: Json = {"name": self.name, "path": self.path, "kinds": kinds, "about": self.about}
        entry["has_texts"] = self.texts is not None
        entry["has_timeline"] = self.timeline is not None
        return entry


def metric_columns(rows: Sequence[Json]) -> Json:
    """The metrics of `metrics.jsonl` as columns: `step`, in the file's counting, and for each name the
    values, None where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    columns: Json = {"step": [row.get("step") for row in rows]}
    columns["values"] = {name: [_shortened(row.get(name)) for row in rows] for name in names}
    return columns


def _shortened(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def index_script(runs: Sequence[RunSource], is_live: bool) -> bytes:
    """The script of the index of all shown runs."""
    index = {"is_live": is_live, "runs": [run.index_entry() for run in runs]}
    return script("index", index)
