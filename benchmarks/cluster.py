"""What Ray costs beside processes of this machine: the time of a step (of the quickstart's size, and with 25
million parameters), the controller's CPU time for a request through two replicas, and arrays both ways.

    python benchmarks/cluster.py [--address HOST:PORT] [--out benchmarks/results/cluster.json]

Both sides run by turns, in the same minutes. Without `--address` a Ray of its own is started. Replicas answer
at once and without a model, so that what is left is the controller's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from toy import SMALL_RUN, parse_arguments

from turnwise.assemble.ray import joined_nodes, make_ray_cluster, open_hosts
from turnwise.cli.main import main as turnwise
from turnwise.cluster.fork_server import prepare_processes
from turnwise.cluster.hosts import Hosts
from turnwise.cluster.messages import SetUp
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.cluster.server_process import SERVERS, ServerProcess
from turnwise.config import load_config
from turnwise.models.make import make_model
from turnwise.protocols import Cluster
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.machine import Machine
from turnwise.runtime.placement import CpuThreads, Placement, RolePlacement
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.types import Completion, SamplingParams, VersionRun

ROOT = Path(__file__).resolve().parent.parent
LAKE = ROOT / "examples" / "frozen_lake" / "agentic.yaml"
KINDS = ("process", "ray")
PROMPT_TOKENS = 300
RESPONSE_TOKENS = 8
AT_ONCE = 32
FEW_EPISODES = ["rollout_batch_size=32", "train_env_manager.num_env_groups=4"]
MODELS: dict[str, list[str]] = {"tiny": [], "small": FEW_EPISODES}
"""Preset of the model → settings of its steps. `small` has 25 million parameters."""


class Ready:
    """A server that answers at once."""

    def __init__(self, rank: RankContext) -> None:
        self._logprobs = np.zeros(RESPONSE_TOKENS, np.float32)
        self._ids = np.arange(RESPONSE_TOKENS, dtype=np.int64)

    async def generate(self, *arguments: Any) -> Completion:
        return Completion(self._ids, self._logprobs, "stop", (VersionRun(0, RESPONSE_TOKENS),))

    def info(self) -> None: ...


class Worker:
    """A rank that takes arrays, and gives one."""

    def __init__(self, rank: RankContext) -> None:
        self._made = np.ones(0, np.float32)

    def take(self, array: np.ndarray) -> float:
        return float(array[-1])

    def make(self, size: int) -> None:
        self._made = np.ones(size, np.float32)

    def give(self) -> np.ndarray:
        return self._made


def nothing() -> None:
    """What processes call when they are set up."""


@contextmanager
def hosted(kind: str, address: str) -> Iterator[tuple[Hosts, Placement, WatchedRunner]]:
    """Who starts processes of a kind, for a rank and two replicas."""
    words = [f"cluster.name={kind}", "num_gpus_per_node=3", "actor_infer.device_mapping=[1,2]"]
    if address and kind == "ray":
        words.append(f"cluster.address={address}")
    config, _ = load_config(LAKE, words)
    machine = Machine(joined_nodes(config)) if kind == "ray" else Machine()
    machine = machine.with_slots(3)
    served = {"actor_infer": RolePlacement(((1,), (2,)), (1, 2))}
    placement = Placement(kind, machine, (0,), {"actor_train": RolePlacement(((0,),), (0,))}, served)
    with ExitStack() as endings:
        runner = endings.enter_context(WatchedRunner())
        hosts = open_hosts(config, placement, runner.watchdog, Stopwatch())
        endings.callback(hosts.close)
        yield hosts, placement, runner


def request_cpu_ms(kind: str, address: str, num_requests: int) -> float:
    """Milliseconds of this process's CPU time for a request; `here` calls a server of this process."""
    if kind == "here":
        with WatchedRunner() as runner:
            return cpu_ms([Ready(RankContext())] * 2, runner, num_requests)
    with hosted(kind, address) as (hosts, _, runner), ExitStack() as endings:
        set_up = SetUp(hosts.environment, sys.path, os.getcwd(), {}, nothing)
        servers: list[ServerProcess] = []
        for process in hosts.start(SERVERS, ["replica 0", "replica 1"], [1, 2]):
            server = ServerProcess(process, runner.run, runner.watchdog)
            endings.callback(server.end)
            server.begin(set_up, Ready, RankContext("actor_infer"))
            servers.append(server)
        for server in servers:
            server.wait_until_ready()
        return cpu_ms(servers, runner, num_requests)


def cpu_ms(servers: list[Any], runner: WatchedRunner, num_requests: int) -> float:
    sampling = SamplingParams(max_new_tokens=RESPONSE_TOKENS)
    prompt = list(range(PROMPT_TOKENS))

    async def converse(number: int) -> None:
        for turn in range(num_requests // AT_ONCE):
            server = servers[number % len(servers)]
            await server.generate(prompt, sampling, f"{number} {turn}", (), ())

    async def play() -> None:
        await asyncio.gather(*map(converse, range(AT_ONCE)))

    started = time.process_time()
    runner.run(play())
    num_made = AT_ONCE * (num_requests // AT_ONCE)
    return round((time.process_time() - started) / num_made * 1000, 3)


def array_seconds(kind: str, address: str, megabytes: int, rounds: int) -> dict[str, float]:
    """Medians of the times in which an array reaches a rank, and comes back."""
    array = np.ones(megabytes * 250_000, np.float32)
    taken: list[float] = []
    returned: list[float] = []
    with hosted(kind, address) as (hosts, placement, runner):
        workers = cluster_of(kind, hosts, placement, runner).spawn("actor_train", Worker)
        workers.call("make", len(array)).result()
        for _ in range(rounds):
            started = time.perf_counter()
            assert workers.call("take", array).result() == 1.0
            taken.append(time.perf_counter() - started)
            started = time.perf_counter()
            assert workers.call("give").result()[-1] == 1.0
            returned.append(time.perf_counter() - started)
    return {
        "argument_s": round(statistics.median(taken), 4),
        "result_s": round(statistics.median(returned), 4),
    }


def cluster_of(kind: str, hosts: Hosts, placement: Placement, runner: WatchedRunner) -> Cluster:
    threads = CpuThreads(train=1, rollout=1, total=1)
    arguments = (runner.run, runner.watchdog, Stopwatch(), threads, torch.set_num_threads, None, None)
    if kind == "ray":
        return make_ray_cluster(*arguments, placement, hosts=hosts)
    return ProcessCluster(*arguments, placement)


def compared_steps(model: str, address: str, rounds: int, words: list[str]) -> dict[str, float]:
    """The median seconds of a step with each kind of processes, whose runs take turns, and what Ray adds."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        made = make_model(model, folder / "model", [LAKE.read_text(encoding="utf-8")], seed=0).folder
        for _ in range(rounds):
            for kind in KINDS:
                seconds = step_seconds(kind, address, folder, [f"pretrain={made}", *words])
                times[kind] += seconds
                print(model, kind, seconds, flush=True)
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    added = medians["ray"] / medians["process"] - 1.0
    return {kind: round(value, 3) for kind, value in medians.items()} | {"added": round(added, 3)}


def step_seconds(kind: str, address: str, folder: Path, words: list[str]) -> list[float]:
    """The times of the steps of FrozenLake, played and trained, without the first."""
    output = tempfile.mkdtemp(dir=folder)
    arguments = [f"cluster.name={kind}", f"output_dir={output}", "track_with=[]", *words]
    if address and kind == "ray":
        arguments.append(f"cluster.address={address}")
    assert turnwise(["train", str(LAKE), "--quiet", *arguments]) == 0
    [metrics] = Path(output).glob("*/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [row["time/step_total"] for row in rows if "time/step_total" in row]
    return seconds[1:] or seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", default="", help="a Ray that runs; default: one of its own")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--requests", type=int, default=6400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cluster.json")
    parser.add_argument("--step-rounds", type=int, default=3, help="runs of each kind, which take turns")
    options = parse_arguments(parser, megabytes=1, requests=64, rounds=1, steps=1, step_rounds=1)
    prepare_processes(["turnwise.assemble.servers"])
    address = options.address
    report: dict[str, Any] = {"machine": describe_machine(), "load_average": round(os.getloadavg()[1], 1)}
    report["cpu_ms_a_request"] = {
        kind: request_cpu_ms(kind, address, options.requests) for kind in ("here", *KINDS)
    }
    write(report, options.out)
    report["arrays"] = {
        kind: array_seconds(kind, address, options.megabytes, options.rounds) for kind in KINDS
    }
    write(report, options.out)
    words = [*SMALL_RUN] if options.toy else ["eval_steps=0", "save_steps=0"]
    words.append(f"max_steps={options.steps}")
    report["step_s"] = {}
    for model, changes in MODELS.items():
        report["step_s"][model] = compared_steps(model, address, options.step_rounds, [*changes, *words])
        write(report, options.out)
    print(json.dumps(report, indent=2))


def write(report: dict[str, Any], path: Path) -> None:
    """Writes what has been measured so far."""
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
