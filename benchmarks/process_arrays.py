"""Arrays between the process of a run and that of a rank: as an argument, and as a result.

    python benchmarks/process_arrays.py [--megabytes 100] [--rounds 5] [--against CHECKOUT]

With `--against` another checkout sends the same arrays by turns, and the ratios are medians of pairs: more
than 1 means that this checkout is faster. `floor` is the time of one copy in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from toy import parse_arguments

from turnwise.cluster.fork_server import drop_processes, prepare_processes
from turnwise.cluster.process_cluster import CpuThreads, ProcessCluster
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog

ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """In the other process."""

    def __init__(self, rank: RankContext) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def take(self, array: np.ndarray) -> float:
        return float(array[-1])

    def make(self, size: int) -> None:
        self.arrays["made"] = np.ones(size, np.float32)

    def give(self) -> np.ndarray:
        return self.arrays["made"]


def seconds(megabytes: int, rounds: int) -> dict[str, float]:
    """The medians over the rounds."""
    array = np.ones(megabytes * 250_000, np.float32)
    times: dict[str, list[float]] = {"argument_s": [], "result_s": [], "floor_s": []}
    prepare_processes(["process_arrays"])
    with WatchedRunner(Watchdog()) as runner:
        threads = CpuThreads(train=1, rollout=1, total=1)
        cluster = ProcessCluster(runner.run, runner.watchdog, Stopwatch(), threads, torch.set_num_threads)
        workers = cluster.spawn("actor_train", Worker)
        workers.call("make", len(array)).result()
        for _ in range(rounds):
            started = time.perf_counter()
            assert workers.call("take", array).result() == 1.0
            times["argument_s"].append(time.perf_counter() - started)
            started = time.perf_counter()
            assert workers.call("give").result()[-1] == 1.0
            times["result_s"].append(time.perf_counter() - started)
            started = time.perf_counter()
            array.copy()
            times["floor_s"].append(time.perf_counter() - started)
        cluster.shutdown()
    drop_processes()
    return {name: round(statistics.median(values), 4) for name, values in times.items()}


def measured(checkout: Path, megabytes: int, rounds: int) -> dict[str, float]:
    """The seconds of a checkout, by this file."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT / "benchmarks")])}
    command = [sys.executable, __file__, "--megabytes", str(megabytes), "--rounds", str(rounds)]
    output = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=checkout
    ).stdout
    result: dict[str, float] = json.loads(output)["seconds"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=3, help="starts of each checkout")
    parser.add_argument("--against", type=Path, help="another checkout")
    options = parse_arguments(parser, megabytes=1, rounds=1)
    report: dict[str, Any] = {"megabytes": options.megabytes, "machine": describe_machine()}
    if options.against is None:
        report["seconds"] = seconds(options.megabytes, options.rounds)
        print(json.dumps(report))
        return
    sizes = (options.megabytes, options.rounds)
    pairs = [
        (measured(options.against.resolve(), *sizes), measured(ROOT, *sizes)) for _ in range(options.pairs)
    ]
    for side, name in enumerate(("before", "now")):
        report[name] = [pair[side] for pair in pairs]
    for direction in ("argument_s", "result_s"):
        report[f"ratio_{direction.removesuffix('_s')}"] = round(
            statistics.median(before[direction] / now[direction] for before, now in pairs), 2
        )
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
