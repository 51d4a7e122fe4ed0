"""Algorithms from one fixed SFT checkpoint, over several seeds: held-out success, learning curves, time to
0.80.

    python benchmarks/algorithms.py TASK --sft-model DIR [--algorithms grpo ppo] [--seeds 1 2 3] [KEY=VALUE
    ...]

One run an algorithm and seed, by `turnwise train`; its model is scored by `turnwise eval` in a new process on
1,000 held-out tasks at temperature 1. Each result is appended to the file as soon as it is there, and what
the file has isn't run again: the table can grow over days. A run that was interrupted is resumed. `--report`
only prints the table and draws the curves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import SMALL_RUN, parse_arguments

from turnwise.tracking.jsonl import read_metrics

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
NUM_TASKS = 1000
GOAL = 0.80


@dataclass(frozen=True)
class Job:
    """The configs that compete on one task, and what all of them are told on top of their files."""

    tag: str
    configs: dict[str, Path]
    overrides: tuple[str, ...] = ()


LAKE, SOKOBAN = EXAMPLES / "frozen_lake", EXAMPLES / "sokoban"
SIX = (
    "custom_envs.FrozenLake.env_config.size=6",
    "custom_envs.FrozenLake.max_steps=20",
    "sequence_length=1024",
)
TASKS = {
    "frozen_lake": Job(
        "FrozenLake",
        {
            "grpo": LAKE / "agentic.yaml",
            "ppo": LAKE / "ppo.yaml",
            "rloo": LAKE / "rloo.yaml",
            "gigpo": LAKE / "gigpo.yaml",
        },
    ),
    "frozen_lake_6x6": Job("FrozenLake", {"grpo": LAKE / "agentic.yaml", "gigpo": LAKE / "gigpo.yaml"}, SIX),
    "sokoban": Job("Sokoban", {"grpo": SOKOBAN / "agentic.yaml", "gigpo": SOKOBAN / "gigpo.yaml"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--sft-model")
    parser.add_argument("--algorithms", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--eval-steps", type=int, default=10)
    parser.add_argument(
        "--curve-episodes", type=int, default=256, help="held-out tasks of each point of the curve"
    )
    parser.add_argument("--tasks", type=int, default=NUM_TASKS, help="held-out tasks of each score")
    parser.add_argument("--work", default="runs/benchmark_algorithms")
    parser.add_argument("--out", type=Path, help="default: results/algorithms_TASK.json")
    parser.add_argument("--picture", type=Path, help="default: docs/images/algorithms_TASK.png")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("overrides", nargs="*")
    toy = {
        "seeds": [1],
        "algorithms": ["grpo"],
        "eval_steps": 1,
        "curve_episodes": 4,
        "tasks": 4,
        "overrides": SMALL_RUN,
    }
    nowhere = Path(os.devnull)
    options = parse_arguments(parser, **toy, out=nowhere, picture=nowhere)
    job = TASKS[options.task]
    file = options.out or HERE / "results" / f"algorithms_{options.task}.json"
    picture = options.picture or HERE.parent / "docs" / "images" / f"algorithms_{options.task}.png"
    rows = json.loads(file.read_text())["runs"] if file.is_file() else []
    done = {(row["algorithm"], row["seed"]) for row in rows}
    wanted = [] if options.report else itertools.product(options.seeds, options.algorithms or job.configs)
    for seed, algorithm in wanted:
        if (algorithm, seed) in done:
            continue
        rows.append(run(job, algorithm, seed, options))
        result = {
            "task": options.task,
            "num_tasks": options.tasks,
            "machine": describe_machine(),
            "runs": rows,
        }
        file.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows, list(job.configs)))
    draw(rows, list(job.configs), picture)


def run(job: Job, algorithm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains one algorithm with one seed and scores the model before and after."""
    work = Path(options.work) / options.task
    name = f"{algorithm}_{seed}"
    common = [
        str(job.configs[algorithm]),
        *job.overrides,
        *options.overrides,
        f"seed={seed}",
        f"pretrain={options.sft_model}",
    ]
    before = score(work / f"sft_{seed}.json", common, str(options.sft_model), options.tasks)
    curve = [f"eval_steps={options.eval_steps}", f"val_batch_size={options.curve_episodes}"]
    places = [f"output_dir={work}", f"exp_name={name}", "save_steps=20", "resume_from_checkpoint=true"]
    turnwise("train", *common, *curve, *places, "--quiet")
    folder = max(path.parent for path in (work / name).glob("*/metrics.jsonl"))
    model = max(
        (folder / "checkpoints").glob("checkpoint-*"),
        key=lambda path: int(path.name.removeprefix("checkpoint-")),
    )
    after = score(work / f"{name}.json", common, str(model), options.tasks)
    environment = json.loads((folder / "environment.json").read_text())
    row = {
        "algorithm": algorithm,
        "seed": seed,
        "revision": environment["git_revision"],
        "after_sft": before,
        "after_rl": after,
        **curves(folder, job.tag),
    }
    print(
        f"{options.task} {name}: {before['success']:.3f} → {after['success']:.3f} in {row['train_s']:.0f} s",
        flush=True,
    )
    return row


def curves(folder: Path, tag: str) -> dict[str, Any]:
    """What the run's metrics say of its course; seconds are those of its steps, without validation and
    checkpoints."""
    rows = read_metrics(folder / "metrics.jsonl")
    seconds = list(itertools.accumulate(row.get("time/step_total", 0.0) for row in rows))
    key = f"val/env/{tag}/success"
    validation = [
        (int(row["step"]), round(clock, 1), row[key])
        for row, clock in zip(rows, seconds, strict=True)
        if key in row
    ]
    reached = next((clock for _, clock, success in validation if success >= GOAL), None)
    return {
        "train_s": round(seconds[-1], 1),
        "seconds_to_goal": reached,
        "sampled_tokens": sum(row.get("rollout/sampled_tokens", 0.0) for row in rows),
        "curve": validation,
    }


def score(file: Path, arguments: Sequence[str], model: str, num_tasks: int) -> dict[str, Any]:
    """The sampled success of a model on the held-out tasks of the config's seed, played once."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        started = time.perf_counter()
        turnwise("eval", *arguments, f"val_batch_size={num_tasks}", "--model", model, "--json", str(partial))
        print(f"  scored in {time.perf_counter() - started:.0f} s", flush=True)
        partial.rename(file)
    overall: dict[str, Any] = json.loads(file.read_text())["overall"]
    return overall


def turnwise(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "turnwise.cli.main", *arguments], check=True)


def table(rows: Sequence[dict[str, Any]], algorithms: Sequence[str]) -> str:
    """A line an algorithm: mean and range over seeds; against the first algorithm the mean difference, pair
    by pair."""
    lines = [
        "| algorithm | seeds | after SFT | after RL: mean (range) | steps' seconds to 0.80 | difference, "
        "95% interval |",
        "|---|---|---|---|---|---|",
    ]
    success = {(row["algorithm"], row["seed"]): row["after_rl"]["success"] for row in rows}
    for algorithm in algorithms:
        own = [row for row in rows if row["algorithm"] == algorithm]
        if not own:
            continue
        after = [row["after_rl"]["success"] for row in own]
        before = statistics.mean(row["after_sft"]["success"] for row in own)
        times = [row["seconds_to_goal"] for row in own]
        reached = ", ".join("never" if t is None else f"{t:.0f}" for t in times)
        seeds = [seed for name, seed in success if name == algorithm and (algorithms[0], seed) in success]
        pairs = [(success[algorithm, seed], success[algorithms[0], seed]) for seed in seeds]
        difference = interval([a - b for a, b in pairs]) if pairs and algorithm != algorithms[0] else ""
        spread = f"{statistics.mean(after):.3f} ({min(after):.3f} to {max(after):.3f})"
        lines.append(f"| {algorithm} | {len(own)} | {before:.3f} | {spread} | {reached} | {difference} |")
    return "\n".join(lines)


def interval(differences: Sequence[float]) -> str:
    """Mean and 95% t interval of paired differences; one pair has no interval."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return f"{mean:+.3f}"
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}.get(
        len(differences), 2.0
    )
    reach = t * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{mean:+.3f} [{mean - reach:+.3f}, {mean + reach:+.3f}]"


def draw(rows: Sequence[dict[str, Any]], algorithms: Sequence[str], picture: Path) -> None:
    """Held-out success over training: the mean over seeds, and from the lowest to the highest as a band."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6))
    FigureCanvasAgg(figure)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for algorithm, color in zip(algorithms, ("#08519c", "#c26a3d", "#4c9085", "#7b6ba8"), strict=False):
        curves = [row["curve"] for row in rows if row["algorithm"] == algorithm]
        if not curves:
            continue
        points = list(zip(*curves, strict=False))
        steps = [values[0][0] for values in points]
        minutes = [statistics.mean(clock for _, clock, _ in values) / 60 for values in points]
        successes = [[success for _, _, success in values] for values in points]
        low, mean, high = ([pick(values) for values in successes] for pick in (min, statistics.mean, max))
        for axes, x in ((by_step, steps), (by_time, minutes)):
            axes.plot(x, mean, color=color, linewidth=2, label=f"{algorithm} ({len(curves)} seeds)")
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    for axes, label in ((by_step, "step"), (by_time, "minutes of training steps")):
        axes.axhline(GOAL, color="#9a9a9a", linestyle="--", linewidth=1)
        axes.set_xlabel(label)
        axes.set_ylim(0, 1.02)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    by_step.set_ylabel("success on held-out tasks")
    by_step.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=130, format="png")


if __name__ == "__main__":
    main()
