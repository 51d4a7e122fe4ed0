"""Weights from two ranks to two receivers of other nodes, against gloo's own broadcast in the same buckets.

    python benchmarks/weights.py [--megabytes 100] [--rounds 9]

All processes are on this machine, and those of different nodes reach each other through loopback
alone. Each round takes, one after the other: a whole publication (both ranks read their tensors, the first
copies them into shared memory of its node and sends that), the sending alone, and gloo's broadcast of ready
buckets among the same three processes. Ratios are medians of the rounds: 1 means as fast as gloo. The last
figures are for servers of bf16, which get half the bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from machine import describe_machine
from toy import parse_arguments

from turnwise.cluster.fork_server import drop_processes, prepare_processes
from turnwise.cluster.messages import SetUp
from turnwise.cluster.process import WorkerProcess
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.cluster.server_process import SERVERS, ServerProcess
from turnwise.cluster.weight_senders import SendingGroup, SendingRanks, spawn_senders
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.machine import Machine, Node
from turnwise.runtime.placement import CpuThreads, Placement, RolePlacement
from turnwise.runtime.rank import Layout, RankContext
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.torch_group import Meeting
from turnwise.runtime.watchdog import Watchdog
from turnwise.transfer.buckets import BUCKET_BYTES

TIMEOUT_S = 300.0
TENSOR_BYTES = 4_000_000
HOST = "127.0.0.1"


class Broadcast:
    """gloo's own broadcast of buckets that are ready, one after the other."""

    def __init__(self) -> None:
        self._store: Any = None
        self._group: Any = None
        self._buckets: list[torch.Tensor] = []

    def open(self) -> Meeting:
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        return Meeting(HOST, self._store.port)

    def join(self, meeting: Meeting, rank: int, num_bytes: int) -> None:
        if rank:
            self._store = dist.TCPStore(meeting.host, meeting.port, is_master=False)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        self._group = dist.ProcessGroupGloo(self._store, rank, 3, options)
        self._buckets = list(torch.zeros(num_bytes, dtype=torch.uint8).split(BUCKET_BYTES))

    def broadcast(self) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for bucket in self._buckets:
            self._group.broadcast([bucket], options).wait()


class Rank:
    """A trainer's rank, which holds all tensors."""

    def __init__(self, rank: RankContext) -> None:
        self._tensors: list[torch.Tensor] = []
        self._gloo = Broadcast()

    def make(self, megabytes: int) -> None:
        num_tensors = max(1, megabytes * 1_000_000 // TENSOR_BYTES)
        self._tensors = [torch.ones(TENSOR_BYTES // 4) for _ in range(num_tensors)]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, tensor in enumerate(self._tensors):
            yield f"layer.{index}", tensor

    def gloo(self, method: str, *args: Any) -> Any:
        return getattr(self._gloo, method)(*args)


class Receiver:
    """A server that receives for its node and samples nothing."""

    def __init__(self, rank: RankContext) -> None:
        self._gloo = Broadcast()

    def info(self) -> None:
        return None

    async def gloo(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self._gloo, method), *args)


def begin() -> None:
    torch.set_num_threads(1)


async def seconds_of(work: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def together(workers: Any, servers: list[ServerProcess], method: str, *args: Any) -> None:
    calls = [server._call("gloo", method, *args) for server in servers]
    await asyncio.gather(*calls, workers.at(0).call("gloo", method, *args))


async def measure(
    workers: Any, senders: SendingRanks, servers: list[ServerProcess], rounds: int
) -> dict[str, Any]:
    """The medians of the rounds."""
    manifest = await senders.manifest()
    meeting = await workers.at(0).call("gloo", "open")
    joining = [
        server._call("gloo", "join", meeting, rank, manifest.num_bytes)
        for rank, server in enumerate(servers, 1)
    ]
    await asyncio.gather(*joining, workers.at(0).call("gloo", "join", meeting, 0, manifest.num_bytes))
    replicas: Any = SimpleNamespace(servers=servers)
    wide = SendingGroup(senders, replicas, "home", HOST, TIMEOUT_S)
    narrow = SendingGroup(replace(senders, dtype="bfloat16"), replicas, "home", HOST, TIMEOUT_S)
    times: dict[str, list[float]] = {name: [] for name in ("publish_s", "send_s", "gloo_s")}
    for number in range(rounds + 1):
        shared = await senders.publish()
        taken = {
            "publish_s": await seconds_of(wide.publish()),
            "send_s": await seconds_of(wide._send(shared)),
            "gloo_s": await seconds_of(together(workers, servers, "broadcast")),
        }
        for name, seconds in taken.items():
            if number:
                times[name].append(seconds)
    narrow_times: list[float] = []
    for number in range(rounds + 1):
        seconds = await seconds_of(narrow.publish())
        if number:
            narrow_times.append(seconds)
    half = (await narrow.publish()).manifest
    result: dict[str, Any] = {name: round(statistics.median(values), 4) for name, values in times.items()}
    for name in ("publish", "send"):
        pairs = zip(times["gloo_s"], times[f"{name}_s"], strict=True)
        result[f"gloo / {name}"] = round(statistics.median(gloo / ours for gloo, ours in pairs), 2)
    result["bf16"] = {
        "publish_s": round(statistics.median(narrow_times), 4),
        "bytes": round(half.num_bytes / manifest.num_bytes, 3),
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "weights.json")
    options = parse_arguments(parser, megabytes=8, rounds=1)
    prepare_processes(["weights"])
    ranks = RolePlacement(((0,), (1,)), (0, 1), Layout(dp=2))
    placement = Placement("process", Machine((Node(2, name="home"),)), (0, 1), {"actor_train": ranks})
    with WatchedRunner(Watchdog()) as runner:
        threads = CpuThreads(train=1, rollout=1, total=1)
        cluster = ProcessCluster(
            runner.run, runner.watchdog, Stopwatch(), threads, torch.set_num_threads, placement=placement
        )
        workers = cluster.spawn("actor_train", Rank)
        workers.call("make", options.megabytes).result()
        senders = spawn_senders(cluster, "actor_train", is_shared=True, is_sharded=True)
        servers: list[ServerProcess] = []
        for number, node in enumerate(("second", "third")):
            process = WorkerProcess.fork(f"the receiver of {node}", SERVERS, Stopwatch())
            server = ServerProcess(process, runner.run, runner.watchdog)
            set_up = SetUp(dict(os.environ), list(sys.path), os.getcwd(), {}, begin)
            server.begin(set_up, Receiver, RankContext("actor_infer", number, 2, node=node))
            server.wait_until_ready()
            servers.append(server)
        report = runner.run(measure(workers, senders, servers, options.rounds))
        for server in servers:
            server.end()
        cluster.shutdown()
    drop_processes()
    report |= {"megabytes": options.megabytes, "rounds": options.rounds, "machine": describe_machine()}
    text = json.dumps(report, indent=1)
    print(text)
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
