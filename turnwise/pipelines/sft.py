"""Supervised fine-tuning on demonstrations. The loss counts the assistant's tokens only."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.batching.plan import optimizer_steps
from turnwise.config import SFTConfig
from turnwise.lifecycle.by_validation import ByValidation
from turnwise.lifecycle.checkpoints import Checkpoints
from turnwise.lifecycle.interrupt import Interrupts
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.pipelines.model_role import ModelRole
from turnwise.protocols import Cluster, Loss
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.tracking.run_log import RunLog
from turnwise.types import Metric, Sample, derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class SFTPipeline:
    """Trains a model to imitate the assistant turns of demonstrations. `assemble.sft.build_sft`
    builds this pipeline."""

    pipeline_config: SFTConfig
    sft: ModelRole
    train_samples: Sequence[Sample]
    val_samples: Sequence[Sample]
    loss: Loss
    tokenizer: "PreTrainedTokenizerBase"
    event_loop: WatchedRunner
    cluster: Cluster
    log: RunLog
    folder: RunFolder
    checkpoints: Checkpoints
    by_validation: ByValidation
    interrupts: Interrupts

    @property
    def num_steps(self) -> int:
        """Number of optimiser steps of the run."""
        return self.checkpoints.num_steps

    def run(self) -> None:
        """Trains in passes over the demonstrations, each in its own seeded order, one optimiser step at a
        time."""
        config = self.pipeline_config
        log = self.log
        seed = derive_seed(config.seed, "sft", "shuffle")
        epochs = optimizer_steps(
            len(self.train_samples), config.samples_per_optimizer_step, seed, config.num_epochs
        )
        steps = [indices for epoch in epochs for indices in epoch][: self.num_steps]
        while True:
            step = self.checkpoints.num_done
            if self._is_validation_due(step):
                self.validate(step)
            if self.checkpoints.is_complete:
                break
            samples = [self.train_samples[index] for index in steps[step]]
            with log.phase("train") as clock, self.checkpoints.updating(step, self.interrupts):
                log.add(self.sft.optimizer_step(samples, self.loss, position=step))
            num_tokens = sum(sample.num_tokens for sample in samples)
            log.add([Metric("system/tps", num_tokens / clock.elapsed_s)])
            log.end_step(step)
            if self.checkpoints.is_due(self.checkpoints.is_complete):
                self.do_checkpoint()
            self.interrupts.release()
        if self.val_samples:
            log.end_step(step)
        self.do_checkpoint()

    def _is_validation_due(self, step: int) -> bool:
        """Whether to validate now: every `eval_steps` steps (0 = only at the end), and after the last one."""
        if not self.val_samples:
            return False
        every = self.pipeline_config.eval_steps
        return self.checkpoints.is_complete or (every > 0 and step % every == 0)

    def validate(self, step: int) -> None:
        """Logs the mean loss of the validation demonstrations' assistant tokens. May save the best model, or
        end the run."""
        metrics = []
        with self.log.phase("val"):
            results = self.sft.forward(self.val_samples, "logprobs")
        for sample, logprobs in zip(self.val_samples, results, strict=True):
            mask = sample.response_mask
            loss = -float(logprobs[mask].mean())
            metrics.append(Metric("sft/val_loss", loss, "mean", weight=float(mask.sum())))
        self.log.add(self.by_validation.see(step, metrics, self.checkpoints))

    def do_checkpoint(self) -> Path:
        """Saves a checkpoint of the last finished step, and returns its folder."""
        with self.log.phase("checkpoint"):
            return self.checkpoints.save()

    def close(self) -> None:
        """Closes log, processes, event loop and folder, and restores Ctrl-C; each even if another fails."""
        with ExitStack() as stack:  # closes in reverse order
            stack.callback(self.folder.close)
            stack.callback(self.interrupts.restore)
            stack.callback(self.event_loop.close)
            stack.callback(self.cluster.shutdown)
            stack.callback(self.log.close)
