"""Supervised fine-tuning against TRL's `SFTTrainer`: tokens a second, and the loss of every step.

    python benchmarks/sft.py --trl-python PYTHON

PYTHON is an interpreter of an environment of its own (`pip install -c constraints.txt -e . trl==1.16.0`).
Both sides train the same random model on the same tokens in the same order: generated word problems, 32 a
step, cross entropy on the assistant's tokens, AdamW, clipping at 1, a constant rate, fp32, on the same cores.
TRL gets the tokens ready-made, and the micro-batch that is its fastest of those tried; what costs it time and
changes nothing is off: autocast, gradient checkpointing, saving, reports. Only tokens of rows count, never
padding. Each pair is a run of each side in a fresh process; the first two steps don't count.
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
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from toy import parse_arguments

HERE = Path(__file__).parent
STEPS, BATCH, SEED, LEARNING_RATE = 40, 32, 42, 1e-3
NUM_WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-python", help="an interpreter that can import trl; none, and only our side runs"
    )
    parser.add_argument("--size", default="tiny", help="of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--trl-micro-batches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "sft.json")
    options = parse_arguments(parser, rounds=1, threads=1, steps=3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_job(folder, options.size, options.steps)
        tried = {}
        if options.trl_python:
            for size in options.trl_micro_batches:
                tried[size] = run_side("trl", options.trl_python, folder, options.threads, size)
        rounds = []
        for _ in range(options.rounds):
            pair = {"own": run_side("own", sys.executable, folder, options.threads)}
            if tried:
                fastest = max(tried, key=lambda size: tried[size]["tokens_per_s"])
                pair["trl"] = run_side("trl", options.trl_python, folder, options.threads, fastest)
            rounds.append(pair)
    result = {
        "machine": describe_machine(),
        "job": {
            "size": options.size,
            "steps": options.steps,
            "rows_a_step": BATCH,
            "threads": options.threads,
        },
        "trl_micro_batches": {size: found["tokens_per_s"] for size, found in tried.items()},
        **(compared(rounds) if tried else {}),
        "rounds": rounds,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=2), flush=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def compared(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of the sides' speeds, and how far their losses are apart."""
    ratios = [pair["own"]["tokens_per_s"] / pair["trl"]["tokens_per_s"] for pair in rounds]
    apart = [
        abs(a / b - 1)
        for pair in rounds
        for a, b in zip(pair["own"]["loss"], pair["trl"]["loss"], strict=True)
    ]
    return {
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "loss_apart": {"mean": statistics.fmean(apart), "largest": max(apart)},
    }


def make_job(folder: Path, size: str, steps: int) -> None:
    """The model, the demonstrations, and their tokens in the order in which turnwise trains on them."""
    from turnwise.batching.plan import optimizer_steps
    from turnwise.chat.template import ChatTemplate
    from turnwise.data.demonstrations import read_rows
    from turnwise.data.gsm8k import generate_problems, sft_row
    from turnwise.examine.demonstrations import encode_demonstrations
    from turnwise.models.load import load_tokenizer
    from turnwise.models.make import make_model
    from turnwise.types import derive_seed

    rows = [sft_row(row, "") for row in generate_problems(steps * BATCH)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    make_model(size, folder / "model", [message["content"] for row in rows for message in row["messages"]])
    template = ChatTemplate(load_tokenizer(str(folder / "model")))
    samples = encode_demonstrations(template, read_rows([folder / "rows.jsonl"]), 512)
    [epoch] = optimizer_steps(len(samples), BATCH, derive_seed(SEED, "sft", "shuffle"), 1)
    ordered = [samples[index] for step in epoch for index in step]
    tokens = [
        {"input_ids": sample.token_ids.tolist(), "completion_mask": sample.response_mask.astype(int).tolist()}
        for sample in ordered
    ]
    (folder / "tokens.json").write_text(json.dumps(tokens), encoding="utf-8")


def run_side(side: str, python: str, folder: Path, threads: int, micro_batch: int = BATCH) -> dict[str, Any]:
    """Tokens a second after the first steps, and the losses of all."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
    code = f"import sft; sft.{side}({str(folder)!r}, {threads}, {micro_batch})"
    command = [python, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); {code}"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, env=environment
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(side, micro_batch, round(found["tokens_per_s"]), flush=True)
    return found


def report(folder: str, step_s: list[float], loss: list[float]) -> None:
    tokens = [
        len(row["input_ids"]) for row in json.loads(Path(folder, "tokens.json").read_text(encoding="utf-8"))
    ]
    counted = sum(tokens[NUM_WARM_UP * BATCH : len(step_s) * BATCH])
    print(json.dumps({"tokens_per_s": counted / sum(step_s[NUM_WARM_UP:]), "loss": loss}))


def own(folder: str, threads: int, micro_batch: int) -> None:
    """Whole steps, their log included."""
    from turnwise import Trainer
    from turnwise.tracking.jsonl import read_metrics

    torch.set_num_threads(threads)
    checkpoint = Trainer.sft(
        Path(folder, "model"),
        Path(folder, "rows.jsonl"),
        is_quiet=True,
        output_dir=str(Path(folder, f"own_{time.time_ns()}")),
        seed=SEED,
        track_with=[],
        training_args={"learning_rate": LEARNING_RATE, "per_device_train_batch_size": micro_batch},
    )
    steps = read_metrics(checkpoint.parents[1] / "metrics.jsonl")
    phases = [sum(value for name, value in step.items() if name.startswith("time/")) for step in steps]
    report(folder, phases, [step["sft/loss"] for step in steps])


def trl(folder: str, threads: int, micro_batch: int) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback, logging
    from trl import SFTConfig, SFTTrainer

    from turnwise.models.load import load_model, load_tokenizer

    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    step_s: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_s.append(time.perf_counter() - self.started)

    arguments = SFTConfig(
        output_dir=str(Path(folder, "trl")),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=BATCH // micro_batch,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_length=None,
        train_sampling_strategy="sequential",
        completion_only_loss=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    model = str(Path(folder, "model"))
    trainer = SFTTrainer(
        model=load_model(model),
        args=arguments,
        train_dataset=Dataset.from_list(json.loads(Path(folder, "tokens.json").read_text(encoding="utf-8"))),
        processing_class=load_tokenizer(model),
        callbacks=[Clock()],
    )
    trainer.train()
    report(folder, step_s, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    main()
