"""The speed of this checkout against another revision: the quickstart, rollouts, training, a whole step,
asynchronous training.

    git worktree add ../before REVISION
    python benchmarks/revisions.py ../before SFT_MODEL [--python PYTHON] [--rounds 3] [--only train rollout]

SFT_MODEL is the one that the quickstart prints; steps are timed with it. PYTHON is an interpreter that
imports the other checkout; without it this one does, by `PYTHONPATH`. Each figure is measured by the
benchmarks of the checkout that it belongs to. The checkouts run in turn, and ratios are medians of pairs:
more than 1 means that this checkout is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import parse_arguments

HERE = Path(__file__).parent
PASSES = """
import sys, torch, train
torch.set_num_threads(2)
samples = train.load()[: int(sys.argv[1])]
model = train.make_model(max(int(sample.token_ids.max()) for sample in samples) + 1)
loss = train.PolicyLoss(train.AlgorithmSettings(entropy_loss_coef=0.005))
run = train.own(model, train.with_advantages(samples), loss)
for _ in sys.stdin:
    print(run(), flush=True)
"""
NUM_PROCESSES, NUM_PASSES, NUM_SAMPLES = 4, 6, 1024
TOY_JOB = {"steps": 3, "groups": 1, "group_size": 2, "max_turns": 2}


@dataclass(frozen=True)
class Checkout:
    root: Path
    python: str
    is_toy: bool = False

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.root), str(self.root / "benchmarks")])}

    def start(self, *command: str) -> subprocess.Popen[str]:
        arguments: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([self.python, *command], cwd=self.root, env=self.environment, **arguments)

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [self.python, *command], cwd=self.root, capture_output=True, text=True, env=self.environment
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} in {self.root} failed:\n{done.stderr[-3000:]}")
        return done.stdout

    def benchmark(self, name: str, *arguments: str) -> Any:
        """The result file of `benchmarks/NAME.py`."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "result.json")
            self.run(f"benchmarks/{name}.py", *arguments, "--out", str(out))
            return json.loads(out.read_text(encoding="utf-8"))


def quickstart(checkout: Checkout, model: str) -> float:
    """Seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        checkout.run("examples/frozen_lake/quickstart.py", "--out", str(Path(folder, "quickstart")))
        return time.perf_counter() - started


def rollout(checkout: Checkout, model: str) -> float:
    """Seconds for a sampled token of conversations of several turns."""
    sizes = ["--toy"] if checkout.is_toy else ["--rounds", "5"]
    found = checkout.benchmark("rollout", "--contenders", "embedded", "--cases", "tiny:fp32", *sizes)
    return 1 / float(found["cases"]["tiny:fp32"]["multi_turn"]["tokens_per_s"]["embedded"])


def end_to_end(checkout: Checkout, model: str) -> float:
    """Seconds of a step of GRPO, without those of the first two."""
    job = {"model": model} | (TOY_JOB if checkout.is_toy else {"steps": 12, "groups": 16, "max_turns": 10})
    answer = json.loads(checkout.run("benchmarks/end_to_end_own.py", json.dumps(job)).splitlines()[-1])
    return statistics.median(answer["step_s"][2:])


def asynchronous(checkout: Checkout, model: str) -> float:
    """Seconds of a step with a slow environment, one batch behind."""
    steps, batch = (4, 8) if checkout.is_toy else (16, 128)
    arguments = f"sys.argv[1], pathlib.Path(sys.argv[2]), {steps}, {batch}, len(os.sched_getaffinity(0))"
    bench = f"importlib.import_module('async').Bench({arguments})"
    code = f"import importlib, json, os, pathlib, sys\nprint(json.dumps({bench}.train(1, 0)['step_s']))"
    with tempfile.TemporaryDirectory() as folder:
        return float(checkout.run("-c", code, model, folder).splitlines()[-1])


def train(this: Checkout, other: Checkout) -> dict[str, list[float]]:
    """Seconds of passes over the quickstart's rollouts under its policy loss, in the fastest process of each
    checkout: of two processes of the same code one may be 8% slower as long as it lives, by where its memory
    lies. All processes are started together, and one computes at a time: passes are short, and the machine's
    speed differs more from minute to minute."""
    num_processes, num_passes, num_samples = (
        (1, 1, 8) if this.is_toy else (NUM_PROCESSES, NUM_PASSES, NUM_SAMPLES)
    )
    with ExitStack() as ended:
        sides = [this, other] * num_processes
        processes = [ended.enter_context(side.start("-c", PASSES, str(num_samples))) for side in sides]
        measured: list[list[float]] = [[] for _ in processes]
        for number in range(num_passes):
            for index, process in list(enumerate(processes))[:: 1 if number % 2 else -1]:
                assert process.stdin and process.stdout
                print(file=process.stdin, flush=True)
                measured[index].append(float(process.stdout.readline()))
    fastest = [min(measured[start::2], key=statistics.median) for start in (0, 1)]
    return dict(zip(("this", "other"), fastest, strict=True))


FIGURES: dict[str, Callable[[Checkout, str], float]] = {
    figure.__name__: figure for figure in (rollout, end_to_end, asynchronous, quickstart)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="a checkout of the other revision")
    parser.add_argument("model", type=Path, help="an SFT model of the quickstart")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that imports it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=["train", *FIGURES], default=["train", *FIGURES])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "revisions.json")
    options = parse_arguments(parser, rounds=1, only=["train"])
    this = Checkout(HERE.parent, sys.executable, options.toy)
    other = Checkout(options.other.resolve(), options.python, options.toy)
    # What isn't measured this time stays as it was.
    result = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    revisions = {name: revision(checkout) for name, checkout in (("this", this), ("other", other))}
    for name in options.only:
        measured = train(this, other) if name == "train" else {"this": [], "other": []}
        for _ in range(0 if name == "train" else options.rounds):
            for side, checkout in (("this", this), ("other", other)):
                measured[side].append(FIGURES[name](checkout, str(options.model.resolve())))
        ratios = [b / a for a, b in zip(measured["this"], measured["other"], strict=True)]
        result[name] = {
            "machine": describe_machine(),
            **revisions,
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "seconds": {side: [round(seconds, 6) for seconds in values] for side, values in measured.items()},
        }
        print(name, result[name]["ratio"], result[name]["ratios"], flush=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def revision(checkout: Checkout) -> str:
    command = ["git", "-C", str(checkout.root), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
