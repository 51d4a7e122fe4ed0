"""Single-turn GRPO on rows and a reward function, against TRL's `GRPOTrainer`; and what the reward manager
costs.

    python benchmarks/rows.py --trl-python PYTHON     # none, and only our side runs

PYTHON is an interpreter of an environment of its own (`pip install -c constraints.txt -e . trl==1.16.0`).
Both sides have the same rows, reward function, random model, batch (64 completions of at most 64 tokens, in
groups of 8), optimiser and schedule, one optimiser step a batch, fp32, on the same cores. Each pair of runs
is 20 steps of each side in a fresh process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine
from toy import parse_arguments

HERE = Path(__file__).parent
STEPS, BATCH, GROUP_SIZE, MAX_TOKENS = 20, 64, 8, 64
NUM_WARM_UP = 2
NUM_AT_ONCE = 8
ROWS = [
    {"prompt": f"Write the digits of {number} in words.", "number": str(number)}
    for number in range(STEPS * BATCH // GROUP_SIZE)
]


def digits(completions: list[Any], number: list[str], **columns: Any) -> list[float]:
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [
        sum(character in digits for character in text) / 10
        for text, digits in zip(texts, number, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="an interpreter that can import trl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "rows.json")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a run, at most {STEPS}")
    parser.add_argument(
        "--completions", type=int, default=10_000, help="that the reward manager is timed with"
    )
    parser.add_argument("--side", choices=("own", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parse_arguments(parser, rounds=1, threads=1, steps=3, completions=64)
    torch.set_num_threads(options.threads)
    if options.side:
        started = time.perf_counter()
        ends = (
            own(options.model, options.steps) if options.side == "own" else trl(options.model, options.steps)
        )
        print(json.dumps({"step_s": np.diff([started, *ends]).tolist()}))
        return
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "reward_stage": reward_manager(options.completions),
    }
    print(json.dumps(result["reward_stage"]), flush=True)
    result["rounds"] = run_rounds(options)
    if options.trl_python:
        for what in ("step_s", "script_s"):
            ratios = [pair["trl"][what] / pair["own"][what] for pair in result["rounds"]]
            result[f"ratio_{what}"] = round(statistics.median(ratios), 2)
            result[f"ratios_{what}"] = [round(ratio, 2) for ratio in ratios]
    print(json.dumps(result, indent=2), flush=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def run_rounds(options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """The times of each side, round after round; of ours alone without an interpreter for the other."""
    from turnwise.models.make import make_model

    pythons = {"own": sys.executable} | ({"trl": options.trl_python} if options.trl_python else {})
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model("tiny", Path(folder) / "tiny", [row["prompt"] for row in ROWS]).folder)
        return [
            {
                side: run_side(side, python, model, options.threads, options.steps)
                for side, python in pythons.items()
            }
            for _ in range(options.rounds)
        ]


def run_side(side: str, python: str, model: str, threads: int, steps: int) -> dict[str, float]:
    """Median seconds of a step after the first two, and of the whole script up to the end of the last."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1"}
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [python, str(HERE / "rows.py"), "--side", side, "--model", model, "--threads", str(threads)]
    command += ["--steps", str(steps)]
    started = time.perf_counter()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, env=environment
    )
    script_s = time.perf_counter() - started
    step_s: list[float] = json.loads(done.stdout.splitlines()[-1])["step_s"]
    found = {"step_s": round(statistics.median(step_s[NUM_WARM_UP:]), 4), "script_s": round(script_s, 2)}
    print(side, found, flush=True)
    return found


def own(model: str, steps: int) -> list[float]:
    """When each step ended."""
    from turnwise import Trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            train_dataset=ROWS,
            reward_funcs=[digits],
            is_quiet=True,
            output_dir=folder,
            track_with=[],
            max_steps=steps,
            save_steps=0,
            rollout_batch_size=BATCH,
            sequence_length=256,
            train_env_manager={"group_size": GROUP_SIZE, "num_env_groups": BATCH // GROUP_SIZE},
            actor_infer={"generating_args": {"max_new_tokens": MAX_TOKENS}},
            actor_train={
                "training_args": {
                    "learning_rate": 1e-5,
                    "per_device_train_batch_size": BATCH,
                    "lr_scheduler_type": "linear",
                    "adam_beta2": 0.999,
                }
            },
        )
        return [time.perf_counter() for report in trainer.steps()][:steps]


def trl(model: str, steps: int) -> list[float]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_TOKENS,
            max_steps=steps,
            learning_rate=1e-5,
            lr_scheduler_type="linear",
            max_grad_norm=1.0,
            loss_type="dapo",
            beta=0.0,
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=digits,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Clock()],
        )
        trainer.train()
    return ends


def reward_manager(num_completions: int) -> dict[str, float]:
    """Microseconds of the manager for one completion, beside those of the function itself."""
    from turnwise.data.reward_functions import FunctionReward
    from turnwise.data.rewards import RewardManager, WeightedReward
    from turnwise.runtime.watchdog import Watchdog
    from turnwise.types import Group, Task, Trajectory, Turn

    def trivial(completions: list[str], number: list[str]) -> list[float]:
        return [float(text == right) for text, right in zip(completions, number, strict=True)]

    def group(index: int) -> Group:
        task = Task(f"train/data/{index}", "data", "train", index, payload=ROWS[index % len(ROWS)], row=0)
        empty = np.zeros(1, np.int64)
        turns = [Turn(empty, empty, np.zeros(1, np.float32), text="seven") for _ in range(GROUP_SIZE)]
        return Group(task, [Trajectory(task, sibling, [turn]) for sibling, turn in enumerate(turns)], index)

    async def score(manager: RewardManager, groups: list[Group]) -> None:
        for start in range(0, len(groups), NUM_AT_ONCE):
            await asyncio.gather(*map(manager, groups[start : start + NUM_AT_ONCE]))

    reward = FunctionReward("trivial", trivial, lambda trajectory: trajectory.turns[-1].text, "prompt")
    times = []
    with Watchdog() as watchdog:
        manager = RewardManager([WeightedReward("trivial", 1.0, reward)], 60.0, watchdog)
        for _ in range(5):
            groups = [group(index) for index in range(num_completions // GROUP_SIZE)]
            started = time.perf_counter()
            asyncio.run(score(manager, groups))
            times.append((time.perf_counter() - started) / num_completions * 1e6)
    started = time.perf_counter()
    for _ in range(num_completions // GROUP_SIZE):
        trivial(["seven"] * GROUP_SIZE, ["7"] * GROUP_SIZE)
    function_us = (time.perf_counter() - started) / num_completions * 1e6
    return {"stage_us": round(statistics.median(times), 1), "function_us": round(function_us, 2)}


if __name__ == "__main__":
    main()
