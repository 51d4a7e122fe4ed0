"""What display and metrics cost a run: the share of its time that goes into measuring, writing and showing
it.

    python benchmarks/display.py RUN_FOLDER

Takes the rollouts and metrics of a finished run of `turnwise train` (the quickstart's, for the figure in
results/) and does again all that was done to show them, on a terminal that is thrown away. Processor time of
all threads is counted, against the wall time of the run's own steps; the run itself isn't repeated, since its
noise is larger than what is looked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine
from rich.console import Console
from rich.live import Live
from toy import parse_arguments

from turnwise.batching.samples import build_samples
from turnwise.envs.frozen_lake.map import random_map
from turnwise.envs.frozen_lake.picture import draw_lake
from turnwise.pipelines.sample_log import log_samples
from turnwise.report.curve import learning_curve
from turnwise.report.gif import Frame, write_gif
from turnwise.rollout.journal import read_journal
from turnwise.rollout.measure import rollout_metrics, system_metrics
from turnwise.tracking.jsonl import JsonlTracker, read_metrics
from turnwise.tracking.live import REFRESH_PER_S, LiveTracker, Screen
from turnwise.tracking.metric_columns import AGENTIC_COLUMNS
from turnwise.tracking.pace import Pace
from turnwise.tracking.run_log import RunLog
from turnwise.tracking.store import StoreTracker, TrackedRun
from turnwise.tracking.tensorboard import TensorBoardStore
from turnwise.types import Group, Metric, samples_of

MEASURED = ("rollout/", "env/", "tokens/", "system/", "time/step_log")
"""What is measured again."""
TERMINAL = {"force_terminal": True, "width": 120, "height": 40, "color_system": "256"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, with metrics.jsonl and rollouts.jsonl")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "display.json"))
    parser.add_argument("--drawings", type=int, default=200, help="of the full screen, whose mean is taken")
    options = parse_arguments(parser, drawings=2)
    rows = [row for row in read_metrics(options.run / "metrics.jsonl") if "time/step_total" in row]
    batches = batches_of(options.run / "rollouts.jsonl")
    step_s = statistics.median(row["time/step_total"] for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        costs = step_costs(rows, batches, Path(folder))
        drawing_s = drawing_cost(rows, options.drawings)
        # Once at the end, with the import of matplotlib.
        curve_s = cpu_seconds(learning_curve, rows, Path(folder) / "curve.png", "run")
        gif_s = cpu_seconds(write_gif, Path(folder) / "a.gif", frames())
    costs |= {
        "live view, drawings": drawing_s * REFRESH_PER_S * step_s,
        "learning curve": curve_s / len(rows),
    }
    result = {
        "ms_a_step": {name: round(1000 * seconds, 2) for name, seconds in costs.items()},
        "total_ms_a_step": round(1000 * sum(costs.values()), 2),
        "median_step_s": round(step_s, 3),
        "share_of_a_step": round(sum(costs.values()) / step_s, 5),
        "ms_a_drawing": round(1000 * drawing_s, 2),
        "ms_a_gif_of_8_frames": round(1000 * gif_s, 1),
        "steps": len(rows),
        "machine": describe_machine(),
    }
    Path(options.out).parent.mkdir(exist_ok=True)
    Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def batches_of(path: Path) -> dict[int, list[Group]]:
    """The groups of each step, as the pipeline had them."""
    groups: dict[tuple[int, str], Group] = {}
    for step, trajectory in read_journal(path):
        trajectory.samples = build_samples(trajectory)
        group = groups.setdefault((step, trajectory.task.id), Group(trajectory.task, [], len(groups)))
        group.trajectories.append(trajectory)
    batches = defaultdict(list)
    for (step, _), group in groups.items():
        batches[step].append(group)
    return batches


def step_costs(
    rows: list[dict[str, float]], batches: dict[int, list[Group]], folder: Path
) -> dict[str, float]:
    """Mean processor seconds a step of everything that happens once a step."""
    screen = Screen("run", AGENTIC_COLUMNS, Pace(len(rows)))
    live = LiveTracker(screen, Console(file=(folder / "terminal").open("w"), **TERMINAL))
    parts: dict[str, list[Any]] = {
        "metrics.jsonl": [JsonlTracker(folder / "metrics.jsonl")],
        "tensorboard": [StoreTracker("tensorboard", lambda: TensorBoardStore(TrackedRun(folder, "", "")))],
        "live view, steps": [live],
    }
    logs = {name: RunLog(trackers) for name, trackers in parts.items()}
    reducer = RunLog([])
    spent: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        step = int(row["step"])
        groups = batches[step]
        others = [Metric(name, value) for name, value in row.items() if not name.startswith(MEASURED)]
        reduced = [Metric(name, value) for name, value in row.items() if name != "time/step_log"]
        spent["measuring"].append(cpu_seconds(measure, reducer, groups, others))
        spent["reducing"].append(cpu_seconds(reducer.end_step, step))
        spent["sample log"].append(cpu_seconds(log_samples, step, groups, str))
        for name, log in logs.items():
            log.add(reduced)
            spent[name].append(cpu_seconds(log.end_step, step))
    for log in logs.values():
        log.close()
    return {name: statistics.fmean(seconds) for name, seconds in spent.items()}


def measure(log: RunLog, groups: list[Group], others: list[Metric]) -> None:
    log.add(rollout_metrics(groups))
    log.add(system_metrics(samples_of(groups), 1.0, 1))
    log.add(others)


def drawing_cost(rows: list[dict[str, float]], num_drawings: int) -> float:
    """Processor seconds of one drawing of the full screen."""
    screen = Screen("run", AGENTIC_COLUMNS, Pace(len(rows)))
    screen.pace.begin_phase("rollout", 0.0)
    for row in rows[:-1]:
        screen.log(int(row["step"]), row, row["step"] * 2.0)
    screen.show(
        "\n".join(
            ["best episode of step 33: train/FrozenLake/527, sibling 2"] + ["P0,0 G3,3 O1,2 → Right"] * 7
        )
    )
    with Path("/dev/null").open("w") as nowhere:
        console = Console(file=nowhere, **TERMINAL)
        with Live(get_renderable=lambda: screen.render(200.0), console=console, auto_refresh=False) as live:
            live.refresh()
            return sum(cpu_seconds(live.refresh) for _ in range(num_drawings)) / num_drawings


def frames() -> list[Frame]:
    """An episode of seven turns."""
    picture = np.asarray(draw_lake(random_map(7, 4, 0.8, None), 0))
    caption = (
        ("saw", "P0,0 G3,3 O1,2 O2,0"),
        ("said", "<answer>Right</answer>"),
        ("did", "Right"),
        ("reward", "0, 0 so far"),
    )
    return [Frame(picture, f"val/FrozenLake/0\nturn {turn} of 7", caption) for turn in range(8)]


def cpu_seconds(work: Callable[..., Any], *arguments: Any) -> float:
    """Processor time of all threads of this process."""
    started = time.process_time()
    work(*arguments)
    return time.process_time() - started


if __name__ == "__main__":
    main()
