"""TRL's side of `real_model.py`: `GRPOTrainer` with its own generation, in a process of its own that answers
with a line of JSON.

It recomputes no log-probs, since a batch is trained on once. What costs time and changes nothing is off:
autocast, gradient checkpointing, reports, checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from real_model_job import RealJob
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="JSON of a `RealJob`")
    job = RealJob(**json.loads(parser.parse_args().job))
    torch.set_num_threads(job.threads)
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(job, folder)), flush=True)


def run(job: RealJob, folder: str) -> dict[str, Any]:
    """What `RealJob` says of an answer."""
    rewards = Rewards(job)
    watch = Stopwatch()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        reward_funcs=rewards.of_answers,
        args=arguments(job, folder),
        train_dataset=Dataset.from_list(dataset(job)),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        callbacks=[watch],
    )
    trainer.train()
    return {"step_s": watch.step_s, "sampled": rewards.sampled, "scores": rewards.scores}


def dataset(job: RealJob) -> list[dict[str, Any]]:
    """The rows with their prompts as conversations, so many that no step lacks one."""
    rows = [json.loads(line) for line in Path(job.rows).read_text(encoding="utf-8").splitlines()]
    num_prompts = job.steps * job.groups
    repeated = (rows * (num_prompts // len(rows) + 1))[:num_prompts]
    return [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in repeated]


def arguments(job: RealJob, folder: str) -> GRPOConfig:
    micro_batch = job.trl_micro_batch or job.batch
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=job.batch // micro_batch,
        num_generations=job.group_size,
        max_completion_length=job.new_tokens,
        max_steps=job.steps,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        loss_type="dapo",
        beta=0.0,
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=job.seed,
    )


class Rewards:
    """The reward function of the rows, which counts tokens and rewards of each step."""

    def __init__(self, job: RealJob) -> None:
        self._correct = runpy.run_path(job.reward)["correct"]
        self.sampled: list[int] = []
        self.scores: list[float] = []

    def of_answers(
        self, completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        scores: list[float] = self._correct([messages[-1]["content"] for messages in completions], answer)
        self.sampled.append(sum(map(len, completion_ids)))
        self.scores.append(statistics.fmean(scores))
        return scores


class Stopwatch(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self._started = 0.0
        self.step_s: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.step_s.append(time.perf_counter() - self._started)
        self._started = time.perf_counter()


if __name__ == "__main__":
    main()
