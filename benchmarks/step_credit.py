"""Where credit of single steps pays: sixteen fixed mazes of 8×8 cells, at most 60 steps, reward at the goal
alone.

    python benchmarks/step_credit.py [--algorithms grpo gigpo] [--hours 3] [--report]

Each run of `examples/maze/agentic.yaml` starts from the same model, made by `examples/imitate.py`, and ends
when a step's episodes succeed in half of the cases, or after 20,000 episodes. First every algorithm plays
each of three learning rates on one seed; then its best rate, the one with the fewest episodes to a half or,
if none gets there, with the highest last success, plays the other seeds. Each result is written as soon as it
is there, and what the file has isn't run again, so a run that was stopped goes on. After `--hours` no run
begins. `--report` only prints the table and draws the curves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import parse_arguments

from turnwise import Trainer
from turnwise.report.curve import compared_curves

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
CONFIG = EXAMPLES / "maze" / "agentic.yaml"
GOAL = 0.5
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"adv_estimator": "grpo"},
    "step_reinforce": {"adv_estimator": "step_reinforce", "step_reward_gamma": 0.95},
    "gigpo": {"adv_estimator": "gigpo", "step_reward_gamma": 0.95},
    "ppo": {
        "adv_estimator": "gae",
        "gae_granularity": "turn",
        "gamma": 0.95,
        "critic_warmup": 2,
        "whiten_advantages": True,
        "train_env_manager.group_size": 1,
        "critic.training_args.learning_rate": 1e-3,
        "critic.training_args.adam_beta2": 0.95,
        "critic.training_args.per_device_train_batch_size": 4096,
        "critic.use_dynamic_batching_in_train": True,
        "critic.max_tokens_per_microbatch_in_train": 8192,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--episodes", type=int, default=20_000, help="at most, of a run")
    parser.add_argument("--batch", type=int, default=128, help="episodes of a step")
    parser.add_argument("--max-actions", type=int, default=60, help="steps in a maze")
    parser.add_argument("--demonstrations", type=int, default=500)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark_step_credit"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step_credit.json")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "images" / "step_credit.png")
    parser.add_argument("--report", action="store_true")
    toy = {"algorithms": ["gigpo"], "rates": [3e-4], "seeds": [1], "episodes": 8, "batch": 8}
    options = parse_arguments(parser, **toy, max_actions=2, demonstrations=4)
    rows = json.loads(options.out.read_text())["runs"] if options.out.is_file() else []
    if not options.report:
        measure(options, rows)
    print(table(rows))
    draw(rows, options.picture)


def measure(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    ends_at = time.monotonic() + 3600 * options.hours
    model = imitate(options)
    for algorithm, rate, seed in wanted(options, rows):
        if time.monotonic() > ends_at:
            print(f"{options.hours:g} hours are over; the same command goes on", flush=True)
            return
        rows.append(run(algorithm, rate, seed, model, options))
        result = {"machine": describe_machine(), "goal": GOAL, "runs": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(row_text(rows[-1]), flush=True)


def imitate(options: argparse.Namespace) -> Path:
    """The model that all runs start from."""
    folder = options.work / "model"
    if not (folder / "sft_model").exists():
        words = [str(CONFIG), "--out", str(folder), "--demonstrations", str(options.demonstrations)]
        words += ["--error-rate", "0.9", "--episodes", "16"]
        subprocess.run([sys.executable, str(EXAMPLES / "imitate.py"), *words], check=True)
    return folder / "sft_model"


def wanted(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float, int]]:
    """The runs that the file lacks: the rates on the first seed, then the other seeds at the best rate.
    `rows` grows meanwhile."""
    first, *others = options.seeds

    def has(algorithm: str, rate: float, seed: int) -> bool:
        return any((row["algorithm"], row["rate"], row["seed"]) == (algorithm, rate, seed) for row in rows)

    sweeps = [(algorithm, rate, first) for algorithm in options.algorithms for rate in options.rates]
    yield from (one for one in sweeps if not has(*one))
    for seed in others:
        for algorithm in options.algorithms:
            rate = best_rate([row for row in rows if row["algorithm"] == algorithm and row["seed"] == first])
            if not has(algorithm, rate, seed):
                yield algorithm, rate, seed


def best_rate(rows: Sequence[dict[str, Any]]) -> float:
    best = min(rows, key=lambda row: (row["episodes_to_goal"] or float("inf"), -row["curve"][-1][1]))
    rate: float = best["rate"]
    return rate


def run(algorithm: str, rate: float, seed: int, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Trains until half of a step's episodes succeed, or the episodes are used up."""
    own = {
        "exp_name": f"{algorithm}_{rate:g}_{seed}",
        "output_dir": str(options.work),
        "pretrain": str(model),
        "seed": seed,
        "max_steps": options.episodes // options.batch,
        "eval_steps": 0,
        "rollout_batch_size": options.batch,
        "track_with": [],
        "custom_envs.Maze.max_steps": options.max_actions,
        "actor_train.training_args.learning_rate": rate,
        "actor_train.training_args.lr_scheduler_type": "constant",
        **ALGORITHMS[algorithm],
    }
    group_size = own.get("train_env_manager.group_size", 8)
    own["train_env_manager.num_env_groups"] = options.batch // group_size
    started = time.perf_counter()
    curve = []
    trainer = Trainer.from_config(CONFIG, is_quiet=True, **nested(own))
    for number, report in enumerate(trainer.steps(), start=1):
        curve.append((number * options.batch, round(report.metrics["env/Maze/success"], 4)))
        if curve[-1][1] >= GOAL:
            break
    reached = next((episodes for episodes, success in curve if success >= GOAL), None)
    return {
        "algorithm": algorithm,
        "rate": rate,
        "seed": seed,
        "episodes_to_goal": reached,
        "seconds": round(time.perf_counter() - started, 1),
        "curve": curve,
    }


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted keys as sections."""
    sections: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        section = sections
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return sections


def row_text(row: dict[str, Any]) -> str:
    name = f"{row['algorithm']}, learning rate {row['rate']:g}, seed {row['seed']}"
    if row["episodes_to_goal"] is None:
        return f"{name}: {row['curve'][-1][1]:.2f} after {row['curve'][-1][0]:,} episodes"
    return f"{name}: {GOAL} after {row['episodes_to_goal']:,} episodes, {row['seconds']:.0f} s"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line an algorithm, at its best learning rate."""
    lines = [
        "| algorithm | learning rate | seeds | reached | episodes to 0.5: median (range) |",
        "|---|---|---|---|---|",
    ]
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        at_best = best_runs(rows, algorithm)
        rate = at_best[0]["rate"]
        reached = [row["episodes_to_goal"] for row in at_best if row["episodes_to_goal"]]
        episodes = "–"
        if reached:
            episodes = f"{statistics.median(reached):,.0f} ({min(reached):,} to {max(reached):,})"
        lines.append(f"| {algorithm} | {rate:g} | {len(at_best)} | {len(reached)} | {episodes} |")
    return "\n".join(lines)


def best_runs(rows: Sequence[dict[str, Any]], algorithm: str) -> list[dict[str, Any]]:
    """The runs of an algorithm at its best learning rate."""
    own = [row for row in rows if row["algorithm"] == algorithm]
    first = min(row["seed"] for row in own)
    rate = best_rate([row for row in own if row["seed"] == first])
    return [row for row in own if row["rate"] == rate]


def draw(rows: Sequence[dict[str, Any]], picture: Path) -> None:
    curves = {
        algorithm: [row["curve"] for row in best_runs(rows, algorithm)]
        for algorithm in dict.fromkeys(row["algorithm"] for row in rows)
    }
    if curves and picture != Path(os.devnull):
        compared_curves({"success": curves}, picture, over="episodes")


if __name__ == "__main__":
    main()
