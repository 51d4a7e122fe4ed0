"""One asynchronous run under a Ray of two nodes that is kept up: a rank on each node, and a replica. It meets
faults at random instants, and each start goes on with the run before. Nothing is trained twice, no step is
missing, and no process is left.

    python faults_ray.py [KIND …] [--times N] [--seed N]

`--times` is how often each kind comes; without it once, with TURNWISE_FULL as `FULL_TIMES` says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster
from train_ray import CONFIG, TEXT, small

from turnwise.lifecycle.checkpoint_files import all_checkpoints, verify
from turnwise.models.make import make_model

FULL_TIMES = {"rank": 20, "sigterm": 20, "raylet": 5, "freeze": 5, "driver": 5}
ENVIRONMENT = {
    "TURNWISE_KERNELS": "off",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
NUM_STARTS = 3
START_S = 900.0
END_S = 300.0
"""No clock is tested: these are what a wait may take where everything is slow."""
NODE_S = 30
NODE_FREEZES_S = 10  # of a run whose node is frozen
NOT_TRIED = 77
"""The exit status where Ray's processes don't start."""
NUM_ACTORS = 5
"""Two ranks, a replica, and an agent on each node."""
RATIO = 1
"""`async_generation_ratio`: the bound of staleness in versions."""
SPREAD_S = 6.0
"""A fault comes at most so long after a step's end."""


class NoRayError(RuntimeError):
    """Ray's processes don't start on this machine in time."""


def started(start: Callable[[], Any]) -> Any:
    """What `start` starts. A raylet gives up after 30 s, which no setting changes, so it is tried again."""
    for number in range(NUM_STARTS):
        try:
            return start()
        except Exception as error:
            print(f"ray: start {number + 1} of {NUM_STARTS}: {error}", file=sys.stderr)
    raise NoRayError(f"Ray has not started {NUM_STARTS} times")


class Nodes:
    """A Ray of two nodes on this machine. The second may be killed or frozen, and is replaced."""

    def __init__(self) -> None:
        self._before = raylets()
        node = {"num_cpus": 2, "node_name": "first", "include_dashboard": False}
        self._cluster = started(lambda: Cluster(initialize_head=True, head_node_args=node))
        self.address = str(self._cluster.address)
        self._second: Any = None
        self.second_raylet = 0
        self._known: set[int] = set()

    def repair(self) -> None:
        """Starts the second node if it isn't there."""
        if self._second is not None:
            return
        before = raylets()
        self._second = started(lambda: self._cluster.add_node(num_cpus=2, node_name="second"))
        self.second_raylet = max(raylets() - before)

    def lose(self) -> None:
        """Ends what is left of the second node, and waits until Ray knows: a run that starts before may
        choose its devices."""
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._cluster.wait_for_nodes(START_S)
        self._second = None

    def actors(self) -> set[int]:
        """The processes of runs that these nodes have started and that live, whatever became of the node."""
        self._known |= self._family()
        named = (b"ray::ActorHost", b"ray::NodeAgent")
        return {number for number in self._known if command(number).startswith(named)}

    def _family(self) -> set[int]:
        family: set[int] = set()
        for raylet in raylets() - self._before:
            family |= tree(raylet)
        return family

    def end(self) -> None:
        self._cluster.shutdown()


class Run:
    """A start of `turnwise train`, which goes on with the start before."""

    def __init__(self, nodes: Nodes, scratch: str, model: str, max_steps: int, node_s: int = NODE_S) -> None:
        keys = small(scratch, model) | {
            "cluster.address": nodes.address,
            "async_generation_ratio": RATIO,
            "actor_train.device_mapping": "[0,2]",
            "actor_infer.device_mapping": "[1]",
            "num_gpus_per_node": 2,
            "max_steps": max_steps,
            "save_steps": 1,
            "deadlines.node_s": node_s,
            "deadlines.start_s": START_S,
            "output_dir": f"{scratch}/runs",
            "exp_name": "run",
            "resume_from_checkpoint": "true",
        }
        texts = [f"{key}={value}" for key, value in keys.items()]
        self._runs = Path(scratch) / "runs"
        self._nodes = nodes
        self._output = Path(scratch) / f"output-{time.monotonic_ns()}.txt"
        self.num_before = len(self.steps())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "turnwise.cli.main", "train", str(CONFIG), "--quiet", *texts],
            stdout=self._output.open("w"),
            stderr=subprocess.STDOUT,
        )

    @property
    def folder(self) -> Path:
        [folder] = self._runs.glob("run/*")
        return folder

    def steps(self) -> list[dict[str, float]]:
        lines = [line for file in self._runs.glob("run/*/metrics.jsonl") for line in file.open()]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_a_step(self) -> None:
        """Waits for a step of this start, and for a checkpoint of any."""
        wait_for(lambda: self._has_trained() or self.has_ended, START_S)
        assert not self.has_ended, self.text()

    def _has_trained(self) -> bool:
        has_checkpoint = any(self._runs.glob("run/*/checkpoints/checkpoint-*"))
        return has_checkpoint and len(self.steps()) > self.num_before

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def text(self) -> str:
        """What this start has written."""
        return self._output.read_text()

    def rank(self, number: int) -> int:
        """The process of a rank, as the log names it."""
        return int(re.findall(rf"of rank {number} on \S+ is process (\d+)", self._log())[-1])

    def error_at(self) -> datetime:
        """When this start met the error that ended it, as the log says."""
        return datetime.fromisoformat(re.findall(r"(?m)^(\S+ \S+) .*the run ends early", self._log())[-1])

    def _log(self) -> str:
        return "".join(path.read_text() for path in self._runs.glob("run/*/*.log"))

    def ended(self) -> int:
        """The exit status."""
        return self.process.wait(END_S)

    def kill(self) -> None:
        if not self.has_ended:
            self.process.kill()
            self.process.wait()


def raylets() -> set[int]:
    return {number for number in processes() if command(number).split(b"\0")[0].endswith(b"/raylet")}


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def command(number: int) -> bytes:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        return b""


def tree(root: int) -> set[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = defaultdict(list)
    for number in processes():
        try:
            fields = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        children[int(fields[1])].append(number)
    members: set[int] = set()
    waiting = [root]
    while waiting:
        number = waiting.pop()
        members.add(number)
        waiting += children[number]
    return members


def wait_for(condition: Callable[[], bool], timeout_s: float) -> float:
    """The seconds until the condition holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + timeout_s, "it doesn't happen"
        time.sleep(0.2)
    return time.monotonic() - started


def end_rank(run: Run, nodes: Nodes) -> None:
    os.kill(run.rank(1), signal.SIGKILL)
    assert run.ended() not in (0, 130), run.text()
    assert "the trainer's process of rank 1 on second" in run.text(), run.text()


def send_sigterm(run: Run, nodes: Nodes) -> None:
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 130, run.text()
    assert len(run.steps()) == last_saved(run), "what SIGTERM leaves is saved"


def end_raylet(run: Run, nodes: Nodes) -> None:
    os.kill(nodes.second_raylet, signal.SIGKILL)
    assert run.ended() not in (0, 130), run.text()
    assert "second" in run.text(), run.text()
    nodes.lose()


def freeze_node(run: Run, nodes: Nodes) -> None:
    """All processes of a node stop, as where its machine is frozen."""
    frozen = tree(nodes.second_raylet)
    for number in frozen:
        os.kill(number, signal.SIGSTOP)
    assert run.ended() not in (0, 130), run.text()
    assert "deadlines.node_s" in run.text(), run.text()
    for number in frozen:
        os.kill(number, signal.SIGKILL)
    nodes.lose()


def end_driver(run: Run, nodes: Nodes) -> None:
    run.process.kill()
    run.ended()


FAULTS: dict[str, Callable[[Run, Nodes], None]] = {
    "rank": end_rank,
    "sigterm": send_sigterm,
    "raylet": end_raylet,
    "freeze": freeze_node,
    "driver": end_driver,
}


def last_saved(run: Run) -> int:
    """The number of steps that the last checkpoint holds."""
    checkpoint = all_checkpoints(run.folder / "checkpoints")[-1]
    verify(checkpoint)
    return int(re.findall(r"\d+", checkpoint.name)[-1])


def check_records(run: Run) -> None:
    """Steps follow each other, no trajectory is trained twice, and staleness keeps its bound."""
    steps = run.steps()
    numbers = [int(step["step"]) for step in steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), numbers
    assert max(step["actor/staleness_max"] for step in steps) <= RATIO
    lines = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
    trained = Counter((line["task"]["id"], line["sibling"]) for line in lines if not line["rejected"])
    assert max(trained.values()) == 1, trained.most_common(3)


def meet(kinds: list[str], chance: random.Random, scratch: str, model: str) -> dict[str, list[float]]:
    """Seconds from each fault to the run's error, to its end, and to the end of its last actor, by kind."""
    seconds: dict[str, list[float]] = {}
    nodes = Nodes()
    try:
        for kind in kinds:
            nodes.repair()
            node_s = NODE_FREEZES_S if kind == "freeze" else NODE_S
            run = Run(nodes, scratch, model, max_steps=1000, node_s=node_s)
            try:
                run.wait_for_a_step()
                time.sleep(chance.uniform(0.0, SPREAD_S))
                actors = nodes.actors()
                assert len(actors) == NUM_ACTORS, ([*map(command, actors)], run.text())
                instant = datetime.now()
                started = time.monotonic()
                FAULTS[kind](run, nodes)
            finally:
                run.kill()
            ended = time.monotonic() - started
            wait_for(lambda: not nodes.actors(), END_S)
            empty = time.monotonic() - started
            times = {"run ended": ended, "machine empty": empty}
            if kind != "driver":
                times["error"] = (run.error_at() - instant).total_seconds()
            for name, value in times.items():
                seconds.setdefault(f"{kind}: {name}", []).append(value)
            print(f"ray: {kind}:", *(f"{name} {value:.1f} s" for name, value in times.items()), flush=True)
        nodes.repair()
        run = Run(nodes, scratch, model, max_steps=len(run.steps()) + 2)
        assert run.process.wait(START_S) == 0, run.text()
        check_records(run)
    finally:
        nodes.end()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", choices=[*FAULTS, []])
    parser.add_argument("--times", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    chance = random.Random(options.seed)
    kinds: list[str] = []
    for kind in options.kinds or FAULTS:
        is_full = bool(os.environ.get("TURNWISE_FULL"))
        kinds += [kind] * (options.times or (FULL_TIMES[kind] if is_full else 1))
    chance.shuffle(kinds)
    with tempfile.TemporaryDirectory() as scratch:
        made = make_model("tiny", Path(scratch) / "model", [TEXT], seed=0)
        try:
            seconds = meet(kinds, chance, scratch, str(made.folder))
        except NoRayError as error:
            if os.environ.get("TURNWISE_FULL"):
                raise
            print(f"ray: faults were not tried: {error}")
            sys.exit(NOT_TRIED)
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"ray: {name} after {middle:.1f} s (at most {max(values):.1f}, {len(values)} times)")


if __name__ == "__main__":
    main()
