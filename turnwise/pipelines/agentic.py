"""The front door: agentic reinforcement learning, step by step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnwise.algorithms.mismatch import staleness_metrics
from turnwise.pipelines.roles import ModelRole
from turnwise.pipelines.run_folder import Checkpoints, RunFolder
from turnwise.pipelines.sample_log import log_samples
from turnwise.protocols import Algorithm, Stateful, WeightTransfer
from turnwise.rollout.journal import Journal
from turnwise.rollout.measure import rollout_metrics, validation_metrics
from turnwise.rollout.scheduler import RolloutScheduler
from turnwise.tracking.run_log import RunLog
from turnwise.types import Metric, Sample, samples_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from turnwise.algorithms.controllers import KLController
    from turnwise.config import AgenticConfig
    from turnwise.inference.server_manager import LLMServerManager

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AgenticPipeline:
    """Trains a policy on what came of its own episodes. `pipelines.build.build_agentic` puts one together.

    The attributes carry the published names. `reference` and `critic` are None where the algorithm doesn't need them.
    """

    pipeline_config: AgenticConfig
    actor_train: ModelRole
    actor_infer: LLMServerManager
    reference: ModelRole | None
    critic: ModelRole | None
    train_rollout_scheduler: RolloutScheduler
    val_rollout_scheduler: RolloutScheduler | None
    algorithm: Algorithm
    kl_ctrl: KLController
    tokenizer: PreTrainedTokenizerBase
    weight_transfer: WeightTransfer
    event_loop: asyncio.Runner
    log: RunLog
    journal: Journal
    folder: RunFolder
    checkpoints: Checkpoints

    def run(self) -> None:
        """Plays, gives credit, trains; `max_steps` times."""
        config, log = self.pipeline_config, self.log
        for step in range(config.max_steps):
            if step % config.actor_train.model_update_frequency == 0:
                self.model_update(step)
            if config.eval_steps and step % config.eval_steps == 0:
                self.validate()

            with log.phase("total") as clock:
                with log.phase("rollout"):
                    groups = self.train_rollout_scheduler.get_batch(config.rollout_batch_size)
                samples = samples_of(groups)

                with log.phase("ref_log_probs"):
                    if self.reference:
                        self.reference.compute_log_probs(samples, into="ref_logprobs")
                with log.phase("old_log_probs_values"):
                    self.set_old_log_probs(samples, step)
                    if self.critic:
                        self.critic.compute_values(samples)
                with log.phase("adv"):
                    log.add(self.algorithm.credit(groups))

                with log.phase("train"):
                    if self.critic and self.algorithm.value_loss:
                        log.add(self.critic.train_step(samples, self.algorithm.value_loss, step))
                    if not self.critic or step >= config.critic_warmup:
                        log.add(self.actor_train.train_step(samples, self.algorithm.loss, step))

            log.add(rollout_metrics(groups, self.train_rollout_scheduler.rejected))
            log.add(staleness_metrics(samples, version=step))
            log.add([Metric("system/tps", sum(s.num_tokens for s in samples) / clock.elapsed_s)])
            self.journal.append(step, groups + self.train_rollout_scheduler.rejected)
            self.do_checkpoint(num_done=step + 1)
            if step % config.logging_steps == 0:
                log_samples(step, groups)
            log.end_step(step)
        self.finish()

    @property
    def running(self) -> Stateful | None:
        """Statistics of the whole run (`running` normalisation), None where nothing uses them."""
        return self.algorithm.running

    def model_update(self, step: int) -> None:
        """Gives the trainer's weights to the inference servers as policy version `step`."""
        with self.log.phase("model_update"):
            self.log.add(self.event_loop.run(self.weight_transfer.update(version=step)))

    def validate(self) -> None:
        """Plays the fixed validation tasks with the policy as the servers have it."""
        if self.val_rollout_scheduler is None:
            return
        with self.log.phase("val"):
            groups = self.val_rollout_scheduler.get_batch(self.pipeline_config.val_batch_size)
        self.log.add(validation_metrics(groups))

    def set_old_log_probs(self, samples: Sequence[Sample], step: int) -> None:
        """Fills the log-probs of the policy at the start of the update, where they must be known before it.

        With one optimiser step on samples of the current policy they are those of the update's own forward pass: the ratio
        is exactly 1, and the loss uses that.
        """
        num_steps = self.actor_train.plan.num_optimizer_steps(len(samples))
        is_stale = any(run.version != step for sample in samples for runs in sample.versions for run in runs)
        if self.pipeline_config.use_rollout_log_probs:
            for sample in samples:
                sample.old_logprobs = sample.rollout_logprobs
        elif num_steps > 1 or is_stale or "old_logprobs" in self.algorithm.needs:
            self.actor_train.compute_log_probs(samples, into="old_logprobs")

    def do_checkpoint(self, num_done: int) -> None:
        """Every `save_steps` steps and after the last one: a model folder with the states of optimiser and loop."""
        if self.checkpoints.is_due(num_done):
            parts = {"kl_ctrl": self.kl_ctrl, "running": self.running, "rollouts": self.train_rollout_scheduler}
            state = {name: part.state_dict() for name, part in parts.items() if part is not None}
            with self.log.phase("checkpoint"):
                self.checkpoints.save(num_done, self.actor_train.workers, self.tokenizer, state)

    def finish(self) -> None:
        """Validates the final policy."""
        if self.pipeline_config.eval_steps:
            self.model_update(self.pipeline_config.max_steps)
            self.validate()
            self.log.end_step(self.pipeline_config.max_steps)

    def close(self) -> None:
        """Closes servers, files and the event loop. Safe after an error in the middle of a step."""
        self.event_loop.run(self.actor_infer.close())
        self.event_loop.close()
        self.journal.close()
        self.log.close()
        self.folder.close_log()
