"""What traces cost the event loop and a step: `python benchmarks/traces.py [--mlflow]`.

1. CPU time of a span, in the event loop alone and with the thread that writes: an observer hears 300 episodes
of 8 turns with a call of a tool in each (17 spans with the episode's own), as the event loop tells them.
`traces.jsonl` then has all of them.
2. A run of the preset `tiny` on FrozenLake with and without `trace.backend: jsonl`, in turn: seconds of a
step, medians of pairs.
3. With `--mlflow` (needs MLflow) instead of these: the same for `trace.backend: mlflow` into a file of
SQLite, with 8 episodes a step of which each is traced, and environments that wait so long that a step takes
5 s or more. MLflow's thread computes while they wait; a step that computes for 5 s shares its cores with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine
from toy import parse_arguments

from turnwise.protocols import TurnPlace
from turnwise.tracking.traces import Traces, TraceSettings
from turnwise.tracking.traces_file import TracesFile, read_traces
from turnwise.types import Group, SamplingParams, Task, Trajectory, Turn, VersionRun

NUM_EPISODES, NUM_TURNS, NUM_TOKENS = 300, 8, 64
GROUP_SIZE = 8
SPANS = 2 * NUM_TURNS + 1
"""An episode, and a response and a call in each turn."""


def turn(number: int) -> Turn:
    rng = np.random.default_rng(number)
    return Turn(
        rng.integers(0, 1000, size=NUM_TOKENS),
        rng.integers(0, 1000, size=NUM_TOKENS),
        np.zeros(NUM_TOKENS, np.float32),
        (VersionRun(0, NUM_TOKENS),),
        text="x" * NUM_TOKENS,
        starts_context=number == 0,
        generate_s=0.01,
        sampling=SamplingParams(max_new_tokens=NUM_TOKENS),
    )


def spans(folder: Path) -> dict[str, Any]:
    """CPU microseconds of a span in the loop, and what the file has."""
    path = folder / "traces.jsonl"
    tags = {"run": "r", "experiment_name": "e"}
    traces = Traces(lambda: TracesFile(path, 256_000_000, None), TraceSettings(), tags)
    turns = [turn(number) for number in range(NUM_TURNS)]
    groups = []
    arguments = {"text": "x"}
    process_started = time.process_time()
    started = time.thread_time()
    for number in range(NUM_EPISODES):
        task = Task(f"train/data/{number}", "data", "train", 0, row=number)
        observer = traces.observe(task, 0)
        for index, made in enumerate(turns):
            place = TurnPlace(index, 0)
            observer.asked(place, ())
            observer.sampled(place, made, {})
            observer.called("note", arguments, "x", 0.001)
            observer.rewarded(place, made)
        trajectory = Trajectory(task, 0, turns)
        observer.ended([trajectory], None)
        groups.append(Group(task, [trajectory], number))
    traces.end_step(0, groups)
    loop_s = time.thread_time() - started
    traces.close()
    process_s = time.process_time() - process_started
    lost: list[str] = []
    written = list(read_traces(path, lost))
    num_spans = sum(len(trace.spans) for trace in written)
    assert len(written) == NUM_EPISODES and not lost, "traces are lost"
    return {
        "us_a_span": 1e6 * loop_s / num_spans,
        "us_a_span_with_writing": 1e6 * process_s / num_spans,
        "num_spans": num_spans,
        "num_expected": NUM_EPISODES * SPANS,
    }


LAKE = {"env_type": "frozen_lake", "max_steps": 8, "max_tokens_per_step": 8}


def run_s(
    folder: Path, name: str, backend: str, num_steps: int, num_episodes: int, lake: dict[str, Any]
) -> float:
    """Median seconds of a step of a run."""
    from turnwise.cli.main import main
    from turnwise.tracking.jsonl import read_metrics

    config = {
        "pretrain": str(folder / "model"),
        "output_dir": str(folder / "runs"),
        "exp_name": name,
        "max_steps": num_steps,
        "save_steps": 0,
        "rollout_batch_size": num_episodes,
        "sequence_length": 2048,
        "track_with": [],
        "custom_envs": {"Lake": lake},
        "train_env_manager": {"num_env_groups": num_episodes // GROUP_SIZE, "group_size": GROUP_SIZE},
        "trace": {"backend": backend, "max_samples_per_step": num_episodes} if backend else {},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(config))
    assert main(["train", str(file), "--quiet"]) == 0
    [metrics] = (folder / "runs" / name).glob("*/metrics.jsonl")
    return statistics.median(row["time/step_wall"] for row in read_metrics(metrics)[1:])


def ratio(folder: Path, backend: str, options: argparse.Namespace, **size: Any) -> float:
    """The seconds of a step with traces over those without: the median of pairs of runs."""
    ratios = []
    for number in range(options.rounds):
        plain = run_s(folder, f"plain{number}", "", options.steps, **size)
        traced = run_s(folder, f"traced{number}", backend, options.steps, **size)
        ratios.append(traced / plain)
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mlflow", action="store_true", help="what MLflow costs a step, and no more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--wait-s", type=float, default=0.65, help="with --mlflow: of an environment's step")
    options = parse_arguments(parser, rounds=1, steps=2, wait_s=0.01)
    from turnwise.models.make import make_model

    print(describe_machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model("tiny", folder / "model", ["Left Right Up Down\n" * 50])
        if options.mlflow:
            arguments = {"wait_s": options.wait_s}
            lake = {**LAKE, "env_type": "slow_lake:WaitingLake", "env_config": arguments}
            times = ratio(folder, "mlflow", options, num_episodes=8, lake=lake)
            print(f"a step      × {times:.3f} with trace.backend: mlflow, all of 8 episodes traced")
            return
        recording = min(
            (spans(make_folder(folder, str(i))) for i in range(5)), key=lambda it: it["us_a_span"]
        )
        times = ratio(folder, "jsonl", options, num_episodes=64, lake=LAKE)
    print(
        f"recording   {recording['us_a_span']:.1f} µs of CPU a span in the event loop, "
        f"{recording['us_a_span_with_writing']:.1f} µs with the writing thread, best of five; "
        f"{recording['num_spans']:,} of {recording['num_expected']:,} spans in traces.jsonl"
    )
    print(f"a step      × {times:.3f} with trace.backend: jsonl ({options.rounds} pairs)")


def make_folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
