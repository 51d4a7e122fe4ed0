"""An asynchronous run under Ray, with two ranks and two replicas in actors, meets one fault of each kind:
SIGTERM (it is saved, and goes on without training anything twice), a dead rank, a dead driver (an empty
machine), and a frozen node."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from train_ray import CONFIG, TEXT, small

from turnwise.lifecycle.checkpoint_files import all_checkpoints, verify
from turnwise.models.make import make_model

START_S = 300.0
EMPTY_S = 60.0
NODE_S = 10
STEPS = 6
RATIO = 1
"""`async_generation_ratio`: the bound of staleness in versions."""


class Run:
    """A run of `turnwise train` in a process of its own, and its actors."""

    def __init__(self, scratch: str, model: str, *words: str) -> None:
        keys = small(scratch, model) | {
            "cluster.name": "ray",
            "async_generation_ratio": RATIO,
            "actor_train.device_mapping": "[0,1]",
            "actor_infer.device_mapping": "[2,3]",
            "num_gpus_per_node": 4,
            "max_steps": STEPS,
            "save_steps": 0,
            "output_dir": f"{scratch}/runs",
            "exp_name": "run",
        }
        texts = [f"{key}={value}" for key, value in keys.items()]
        self._before = actors()
        self.log = Path(scratch) / "output.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "turnwise.cli.main", "train", str(CONFIG), "--quiet", *texts, *words],
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
        )
        self._runs = Path(scratch) / "runs"

    @property
    def folder(self) -> Path:
        return max(self._runs.glob("*/*"))

    def steps(self) -> list[dict[str, float]]:
        lines: list[str] = []
        for file in self._runs.glob("*/*/metrics.jsonl"):
            lines += file.read_text().splitlines()
        return [json.loads(line) for line in lines]

    def wait_for_step(self, number: int) -> None:
        wait_for(lambda: len(self.steps()) >= number or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        """What the run has written, to its output and its log."""
        logs = [path.read_text() for path in self._runs.glob("*/*/*.log")]
        return self.log.read_text() + "".join(logs)

    def actors(self) -> set[int]:
        return actors() - self._before

    def ended(self, timeout_s: float = START_S) -> int:
        """The exit status."""
        return self.process.wait(timeout_s)


def actors() -> set[int]:
    """The processes of this machine that Ray has given the name of a class of ours."""
    numbers: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name = path.read_bytes()
        except OSError:
            continue
        if name.startswith((b"ray::ActorHost", b"ray::NodeAgent")):
            numbers.add(int(path.parent.name))
    return numbers


def wait_for(condition: Callable[[], bool], timeout_s: float) -> float:
    """The seconds until the condition holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + timeout_s, "it doesn't happen"
        time.sleep(0.05)
    return time.monotonic() - started


def ranks(log: str) -> list[int]:
    """The processes of the trainer's ranks, as the log names them."""
    return [int(number) for number in re.findall(r"of rank \d+ on \S+ is process (\d+)", log)]


def saved_and_continued(scratch: str, model: str) -> str:
    """SIGTERM: the whole steps are saved, the status is 130, and the next start trains nothing twice."""
    run = Run(scratch, model)
    run.wait_for_step(2)
    assert len(run.actors()) == 5, "two ranks, two replicas and the node's agent"
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 130, run.text()
    seconds = wait_for(lambda: not run.actors(), EMPTY_S)
    [checkpoint, *_] = reversed(all_checkpoints(run.folder / "checkpoints"))
    verify(checkpoint)
    num_saved = len(run.steps())
    run = Run(scratch, model, f"resume_from_checkpoint={run.folder}")
    assert run.ended() == 0, run.text()
    steps = run.steps()
    assert len(steps) == STEPS, steps
    assert max(step["actor/staleness_max"] for step in steps) <= RATIO
    lines = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
    trained = Counter((line["task"]["id"], line["sibling"]) for line in lines if not line["rejected"])
    assert max(trained.values()) == 1, trained.most_common(3)
    return (
        f"SIGTERM: saved after {num_saved} steps, machine empty {seconds:.1f} s later, continued to {STEPS}"
    )


def a_dead_rank(scratch: str, model: str) -> str:
    run = Run(scratch, model, "max_steps=1000")
    run.wait_for_step(1)
    os.kill(ranks(run.text())[1], signal.SIGKILL)
    started = time.monotonic()
    assert run.ended() not in (0, 130)
    text = run.text()
    assert "the trainer's process of rank 1" in text and "has ended" in text, text
    return f"a dead rank: the run ended {time.monotonic() - started:.1f} s later, with its name"


def a_dead_driver(scratch: str, model: str) -> str:
    run = Run(scratch, model, "max_steps=1000")
    run.wait_for_step(1)
    assert run.actors()
    run.process.kill()
    run.ended()
    seconds = wait_for(lambda: not run.actors(), EMPTY_S)
    return f"a dead driver: machine empty {seconds:.1f} s later"


def a_frozen_node(scratch: str, model: str) -> str:
    """All processes of a node stop, its agent too, as where its machine is frozen."""
    run = Run(scratch, model, "max_steps=1000", f"deadlines.node_s={NODE_S}")
    run.wait_for_step(1)
    for number in run.actors():
        os.kill(number, signal.SIGSTOP)
    started = time.monotonic()
    assert run.ended() not in (0, 130)
    seconds = time.monotonic() - started
    assert "deadlines.node_s" in run.text(), run.text()
    wait_for(lambda: not run.actors(), EMPTY_S)
    return f"a frozen node: the run ended {seconds:.1f} s later (deadlines.node_s: {NODE_S})"


FAULTS = (saved_and_continued, a_dead_rank, a_dead_driver, a_frozen_node)


def main() -> None:
    os.environ["TURNWISE_KERNELS"] = "off"
    names = sys.argv[1:]
    for fault in FAULTS:
        if names and fault.__name__ not in names:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            made = make_model("tiny", Path(scratch) / "model", [TEXT], seed=0)
            print(f"ray: {fault(scratch, str(made.folder))}", flush=True)


if __name__ == "__main__":
    main()
