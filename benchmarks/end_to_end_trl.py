"""TRL's side of `end_to_end.py`: `GRPOTrainer` with a `rollout_func`, in a process of its own that answers
with a line of JSON.

Episodes are those of `frozen_lake_player.py`, the library's agent and environment over one `generate` call
for all live episodes. TRL gets token ids and which of them were sampled; it recomputes no log-probs, since a
batch is trained on once. What costs time and changes nothing is off: autocast, gradient checkpointing,
reports, checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from end_to_end_job import Job
from frozen_lake_player import Player
from rollout_servers import GenerateServer
from transformers import TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer

from turnwise.batching.samples import build_samples
from turnwise.models.load import load_model, load_tokenizer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="JSON of a `Job`")
    job = Job(**json.loads(parser.parse_args().job))
    torch.set_num_threads(job.threads)
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(job, Path(folder))), flush=True)


def run(job: Job, folder: Path) -> dict[str, Any]:
    """What `Job` says of an answer."""
    model, tokenizer = load_model(job.model), load_tokenizer(job.model)
    rollouts = Rollouts(job, model, tokenizer.pad_token_id)
    watch = Stopwatch(job, rollouts)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda scores, **_: scores,
        args=arguments(job, folder),
        train_dataset=Dataset.from_list([{"prompt": str(index)} for index in range(job.steps * job.groups)]),
        processing_class=tokenizer,
        rollout_func=rollouts,
        callbacks=[watch],
    )
    trainer.train()
    return {
        "step_s": watch.step_s,
        "rollout_s": rollouts.seconds,
        "tokens": rollouts.tokens,
        "curve": watch.curve,
    }


def arguments(job: Job, folder: Path) -> GRPOConfig:
    micro_batch = job.trl_micro_batch or job.batch
    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=job.batch // micro_batch,
        num_generations=job.group_size,
        max_completion_length=job.max_length,
        max_steps=job.steps,
        learning_rate=job.learning_rate,
        adam_beta2=job.adam_beta2,
        lr_scheduler_type="linear",
        warmup_steps=job.warmup_steps,
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


class Rollouts:
    """A `rollout_func`. A prompt is the number of its task, and comes once for each sibling."""

    def __init__(self, job: Job, model: Any, pad_id: int) -> None:
        self._job = job
        self._player = Player(
            job.model, model, max_length=job.max_length, partition=job.groups, max_steps=job.max_turns
        )
        self._server = GenerateServer(model, pad_id)
        self.seconds: list[float] = []
        self.tokens: list[dict[str, float]] = []

    def __call__(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, Any]:
        started = time.perf_counter()
        indices = [int(prompt) for prompt in prompts[:: self._job.group_size]]
        trainer.model.eval()
        trajectories = asyncio.run(
            self._player.play(self._server, indices, self._job.group_size, seed=self._job.seed)
        )
        trainer.model.train()
        samples = [build_samples(trajectory)[0] for trajectory in trajectories]
        self.seconds.append(time.perf_counter() - started)
        self.tokens.append(
            {
                "total": sum(sample.num_tokens for sample in samples),
                "sampled": sum(sample.num_trained for sample in samples),
            }
        )
        cut = [(sample, int(sample.response_mask.argmax())) for sample in samples]
        return {
            "prompt_ids": [sample.token_ids[:start].tolist() for sample, start in cut],
            "completion_ids": [sample.token_ids[start:].tolist() for sample, start in cut],
            "env_mask": [sample.response_mask[start:].astype(int).tolist() for sample, start in cut],
            "logprobs": None,
            "scores": [trajectory.score for trajectory in trajectories],
        }

    def success(self) -> float:
        """Success rate over the held-out episodes, with the weights as they are now."""
        indices = range(self._job.eval_episodes)
        trajectories = asyncio.run(
            self._player.play(self._server, indices, 1, seed=self._job.seed, split="val")
        )
        return statistics.fmean(trajectory.metrics["success"] for trajectory in trajectories)


class Stopwatch(TrainerCallback):
    """Seconds of each step, and held-out success every so many of them, which costs none of these seconds."""

    def __init__(self, job: Job, rollouts: Rollouts) -> None:
        self._job = job
        self._rollouts = rollouts
        self._started = 0.0
        self.step_s: list[float] = []
        self.curve: list[tuple[float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> Any:
        self.step_s.append(time.perf_counter() - self._started)
        if self._job.eval_every and len(self.step_s) % self._job.eval_every == 0:
            model.eval()
            self.curve.append((sum(self.step_s), self._rollouts.success()))
            model.train()
            control.should_training_stop = self.curve[-1][1] >= self._job.target
        self._started = time.perf_counter()
        return control


if __name__ == "__main__":
    main()
