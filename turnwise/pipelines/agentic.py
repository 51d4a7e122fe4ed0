"""The front door: agentic reinforcement learning, step by step."""

from __future__ import annotations

from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.algorithms.mismatch import staleness_metrics
from turnwise.pipelines.checkpoints import Checkpoints
from turnwise.pipelines.interrupt import Interrupts
from turnwise.pipelines.parity import ParityGate
from turnwise.pipelines.pictures import Pictures
from turnwise.pipelines.roles import ModelRole, Update
from turnwise.pipelines.run_folder import RunFolder
from turnwise.pipelines.sample_log import log_samples
from turnwise.protocols import Algorithm, Cluster, Stateful, WeightTransfer
from turnwise.rollout.journal import Journal
from turnwise.rollout.measure import rollout_metrics, system_metrics, validation_metrics
from turnwise.rollout.source import RolloutSource
from turnwise.tracking.run_log import RunLog
from turnwise.types import Group, samples_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from turnwise.algorithms.controllers import KLController
    from turnwise.config import AgenticConfig
    from turnwise.event_loop import WatchedRunner
    from turnwise.inference.server_manager import LLMServerManager


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
    train_rollout_scheduler: RolloutSource
    val_rollout_scheduler: RolloutSource | None
    algorithm: Algorithm
    kl_ctrl: KLController
    tokenizer: PreTrainedTokenizerBase
    weight_transfer: WeightTransfer
    parity_gate: ParityGate
    event_loop: WatchedRunner
    cluster: Cluster
    log: RunLog
    journal: Journal
    pictures: Pictures
    folder: RunFolder
    checkpoints: Checkpoints
    interrupts: Interrupts

    def run(self) -> None:
        """Plays, gives credit, trains; until all steps are done. Where the group filter leaves nothing, nothing is trained."""
        config, log = self.pipeline_config, self.log
        first = self.checkpoints.num_done
        for step in range(first, self.checkpoints.num_steps):
            if step == first or step % config.actor_train.model_update_frequency == 0:
                self.model_update(step)
            if config.eval_steps and step % config.eval_steps == 0:
                self.validate()

            groups: list[Group] = []
            update = Update(self.actor_train, self.algorithm.loss, step, config.is_streamed)
            stream = self.train_rollout_scheduler.parts(config.rollout_batch_size, config.is_streamed)
            with log.phase("total") as clock, closing(log.each("rollout", stream)) as parts:
                for part in parts:
                    samples = samples_of(part.groups)
                    with log.phase("ref_log_probs_values_reward"):
                        if self.reference:
                            log.add(self.reference.compute_log_probs(samples, into="ref_logprobs"))
                    with log.phase("old_log_probs_values"):
                        needs = self.algorithm.needs | ({"old_logprobs"} if config.async_generation_ratio else set())
                        log.add(self.actor_train.set_old_log_probs(samples, step, config.use_rollout_log_probs, needs))
                        if self.critic:
                            log.add(self.critic.compute_values(samples))
                    if part.is_last:
                        self.interrupts.hold("finishing this step")
                    with log.phase("adv"):
                        log.add(self.algorithm.credit(part.groups) if part.groups else ())
                    with log.phase("train"), self.checkpoints.updating(step) if part.is_last else nullcontext():
                        if self.critic and self.algorithm.value_loss:
                            log.add(self.critic.train_step(samples, self.algorithm.value_loss, step))
                        if not self.critic or step >= config.critic_warmup:
                            log.add(update.add(samples, part.is_last))
                    groups += part.groups

            samples = samples_of(groups)
            log.add(rollout_metrics(groups, self.train_rollout_scheduler.rejected))
            log.add(staleness_metrics(samples, version=step))
            log.add(system_metrics(samples, clock.elapsed_s, num_trajectories=self.train_rollout_scheduler.num_episodes))
            self.journal.append(step, groups + self.train_rollout_scheduler.rejected)
            if step % config.logging_steps == 0:
                log.show(*log_samples(step, groups, self.tokenizer.decode))
            log.end_step(step, groups)
            if self.checkpoints.is_due:
                self.do_checkpoint()
            self.interrupts.release()
        self.finish()

    @property
    def running(self) -> Stateful | None:
        """Statistics of the whole run (`running` normalisation), None where nothing uses them."""
        return self.algorithm.running

    def model_update(self, step: int) -> None:
        """Gives the trainer's weights to the inference servers as policy version `step`."""
        with self.log.phase("model_update"):
            self.log.add(self.event_loop.run(self.weight_transfer.update(version=step)))
            self.log.add(self.parity_gate.check(version=step))

    def validate(self) -> None:
        """Plays the fixed validation tasks with the policy as the servers have it."""
        if self.val_rollout_scheduler is None:
            return
        with self.log.phase("val"):
            groups = self.val_rollout_scheduler.get_batch(self.pipeline_config.val_batch_size)
            self.pictures.write(f"step-{self.checkpoints.num_done}", groups)
        self.log.add(validation_metrics(groups))

    def do_checkpoint(self) -> Path:
        """A model folder with the states of optimiser and loop after the steps that are whole."""
        with self.log.phase("checkpoint"):
            return self.checkpoints.save()

    def finish(self) -> None:
        """Validates the final policy."""
        if self.pipeline_config.eval_steps:
            self.model_update(self.checkpoints.num_done)
            self.validate()
            self.log.end_step(self.checkpoints.num_done)

    def close(self) -> None:
        """Closes servers, files and the event loop, each whatever becomes of the others. Safe in the middle of a step."""
        with ExitStack() as rest:
            for close in (self.folder.close, self.interrupts.restore, self.event_loop.close, self.journal.close):
                rest.callback(close)
            rest.callback(self.cluster.shutdown)
            rest.callback(lambda: self.event_loop.run(self.actor_infer.close()))
            rest.callback(self.train_rollout_scheduler.close)
            rest.callback(self.log.close)
