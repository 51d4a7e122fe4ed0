"""A whole GRPO step against TRL's `GRPOTrainer` in its fastest form, and the wall time to 0.80 on held-out
tasks.

    python benchmarks/end_to_end.py --trl-python PYTHON                       # times of a step python
    benchmarks/end_to_end.py --trl-python PYTHON --sft-model MODEL     # and the way to 0.80, some ten minutes
    more python benchmarks/end_to_end.py                                           # without the comparison

PYTHON is an interpreter of an environment of its own (`pip install -c constraints.txt -e . trl==1.16.0`).
Both sides have the same model, environment, conversations, batch, objective, optimiser and schedule, in fp32
on the same cores; TRL's episodes run over one batched `generate` for all that live (`rollout_func`).

- *A step*: the preset `tiny` with random weights, so that nearly all of 64 episodes take all 8 turns of 8
tokens and both sides
  compute as many tokens. The sides run in turn, and the ratio is the median of pairs; the first two steps of
  a run don't count.
- *Share of the roofline*: the products with weights that the step needs, at the machine's rate of multiplying
matrices: each
  token once in rollouts and three times in training, without those that siblings share in a micro-batch;
  logits of sampled tokens alone, and so of the last layer all that follows its keys and values.
- *To 0.80*: whole runs from MODEL, an SFT checkpoint of the quickstart. Validation is left out of the
seconds.
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from end_to_end_job import Job
from machine import describe_machine, gemm_gflops
from toy import parse_arguments
from transformers import AutoConfig

from turnwise.models.make import make_model

HERE = Path(__file__).parent
CORPUS = [
    "Walk to the goal G and avoid the holes O. Left Down Right Up",
    "S0,0 G3,3 O1,2 <answer>Left</answer>",
]
TOY = {"steps": 3, "groups": 1, "group_size": 2, "max_turns": 2, "eval_episodes": 2}
NUM_WARM_UP = 2
"""Steps of a run before the first that counts."""
TARGET = 0.80
PAUSE_S = 2.0
"""Before each run, for the threads of the last one to end."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-python", help="an interpreter that can import trl; none, and only our side runs"
    )
    parser.add_argument(
        "--sft-model", help="the checkpoint that runs to 0.80 start from; none, and there are none"
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs whose steps are timed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--trl-micro-batches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the runs to 0.80")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "end_to_end.json")
    parser.add_argument(
        "--gemm-size", type=int, default=2048, help="of the matrices that give the rate of the roofline"
    )
    options = parse_arguments(parser, rounds=1, threads=1, gemm_size=128)
    small: dict[str, Any] = TOY if options.toy else {}
    torch.set_num_threads(options.threads)
    pythons = {"own": sys.executable} | ({"trl": options.trl_python} if options.trl_python else {})
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model("tiny", Path(folder) / "tiny", CORPUS).folder)
        job = Job(model, **{"threads": options.threads} | small)
        if options.trl_python:
            job = fastest(job, options.trl_python, options.trl_micro_batches)
        result: dict[str, Any] = {
            "machine": describe_machine(),
            "job": asdict(job),
            "step": time_steps(job, pythons, options.rounds, options.gemm_size),
        }
        print(json.dumps(result["step"], indent=2), flush=True)
    if options.sft_model:
        whole = {"steps": 80, "groups": 16, "max_turns": 10, "eval_every": 5, "target": TARGET} | small
        job = replace(job, model=options.sft_model, **whole)
        result["to_target"] = {name: [] for name in pythons}
        for seed in options.seeds:
            for name, python in pythons.items():
                result["to_target"][name].append(to_target(ask(python, name, replace(job, seed=seed))))
        print(json.dumps(result["to_target"], indent=2), flush=True)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def fastest(job: Job, python: str, micro_batches: list[int]) -> Job:
    """The job with the micro-batch with which TRL's steps take the least time."""
    times = {}
    for size in micro_batches:
        times[size] = median(
            ask(python, "trl", replace(job, steps=NUM_WARM_UP + 3, trl_micro_batch=size))["step_s"]
        )
    print(f"TRL's step by micro-batch: {times}", flush=True)
    return replace(job, trl_micro_batch=min(times, key=lambda size: times[size]))


def time_steps(job: Job, pythons: dict[str, str], num_rounds: int, gemm_size: int) -> dict[str, Any]:
    """Medians over the rounds."""
    rounds = []
    for _ in range(num_rounds):
        answers = {name: ask(python, name, job) for name, python in pythons.items()}
        row = {
            f"{name}_{what}": median(answer[what])
            for name, answer in answers.items()
            for what in ("step_s", "rollout_s")
        }
        tokens = {
            name: {what: median([step[what] for step in answer["tokens"]]) for what in ("total", "sampled")}
            for name, answer in answers.items()
        }
        least_s = (
            least_flop(job.model, **tokens["own"], merged=median(answers["own"]["merged"]))
            / gemm_gflops(gemm_size)
            / 1e9
        )
        row["roofline_share"] = least_s / row["own_step_s"]
        if "trl" in pythons:
            row["ratio"] = row["trl_step_s"] / row["own_step_s"]
        rounds.append(row)
        print({name: round(value, 3) for name, value in rounds[-1].items()}, tokens, flush=True)
    medians = {name: round(statistics.median(row[name] for row in rounds), 3) for name in rounds[0]}
    ratios = {"ratios": [round(row["ratio"], 2) for row in rounds]} if "trl" in pythons else {}
    return medians | ratios | {"tokens": tokens}


def median(values: list[float]) -> float:
    return statistics.median(values[NUM_WARM_UP:])


def least_flop(model: str, total: float, sampled: float, merged: float) -> float:
    """Operations of a step: two for each weight that multiplies a token, twice as many again on the way back;
    attention, a few percent here, is left out. `merged` is the share of tokens that an earlier sibling has
    too."""
    config = AutoConfig.from_pretrained(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_values = 2 * config.num_key_value_heads * head_dim * config.hidden_size
    layer = key_values + config.hidden_size * (
        2 * config.num_attention_heads * head_dim + 3 * config.intermediate_size
    )
    distinct = total * (1 - merged)
    of_all = distinct * ((config.num_hidden_layers - 1) * layer + key_values)
    return 4 * 2 * (of_all + sampled * (layer - key_values + config.vocab_size * config.hidden_size))


def to_target(answer: dict[str, Any]) -> dict[str, Any]:
    """Seconds of training until success first reached the target, None where it didn't."""
    reached = [seconds for seconds, success in answer["curve"] if success >= TARGET]
    return {"seconds": round(reached[0], 1) if reached else None, "curve": answer["curve"]}


def ask(python: str, name: str, job: Job) -> dict[str, Any]:
    """What a run says on its last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    )
    command = [python, str(HERE / f"end_to_end_{name}.py"), json.dumps(asdict(job))]
    time.sleep(PAUSE_S)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
