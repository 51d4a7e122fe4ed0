"""transformers' `Trainer` on the samples of benchmarks/train.py, with nothing switched on that it doesn't
need."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, logging

from turnwise.types import Sample

IGNORED = -100
"""The label of a token that isn't trained on."""


class Stopwatch(TrainerCallback):
    """Seconds from the first step's begin to the last one's end."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.started


def build_trainer(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    sampling: str,
    micro_batch: int,
    accumulation: int,
    learning_rate: float,
) -> Trainer:
    """One epoch over the samples in the order of `train_sampling_strategy`."""
    logging.set_verbosity_error()
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        train_sampling_strategy=sampling,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model.config.use_cache = False
    return Trainer(model, arguments, collate, [row(sample) for sample in samples])


def run_trainer(trainer: Trainer) -> tuple[float, float]:
    """Seconds of the training, and the mean loss of its steps."""
    watch = Stopwatch()
    trainer.pop_callback(
        next(type(c) for c in trainer.callback_handler.callbacks if "Printer" in type(c).__name__)
    )
    trainer.add_callback(watch)
    output = trainer.train()
    return watch.seconds, output.training_loss


def row(sample: Sample) -> dict[str, torch.Tensor]:
    token_ids = torch.from_numpy(sample.token_ids)
    return {
        "input_ids": token_ids,
        "labels": token_ids.where(torch.from_numpy(sample.response_mask), IGNORED),
    }


def collate(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded on the right to the longest of the micro-batch."""
    inputs = {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=padding)
        for name, padding in (("input_ids", 0), ("labels", IGNORED))
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    inputs["attention_mask"] = (torch.arange(inputs["input_ids"].shape[1]) < lengths[:, None]).long()
    return inputs
