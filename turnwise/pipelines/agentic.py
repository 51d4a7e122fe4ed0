"""The front door: agentic reinforcement learning, step by step. Begin reading at `AgenticPipeline.run`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.algorithms.mismatch import staleness_metrics
from turnwise.pipelines.checkpoints import Checkpoints
from turnwise.pipelines.interrupt import Interrupts
from turnwise.pipelines.parity import ParityGate
from turnwise.pipelines.pictures import Pictures
from turnwise.pipelines.policy_update import PolicyUpdate
from turnwise.pipelines.roles import ModelRole
from turnwise.pipelines.run_folder import RunFolder
from turnwise.pipelines.sample_log import log_samples
from turnwise.pipelines.step_rollout import StepRollout
from turnwise.protocols import Algorithm, Cluster, Stateful, WeightTransfer
from turnwise.rollout.journal import Journal
from turnwise.rollout.measure import rollout_metrics, system_metrics, validation_metrics
from turnwise.rollout.source import RolloutSource
from turnwise.tracking.run_log import RunLog
from turnwise.types import samples_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from turnwise.algorithms.controllers import KLController
    from turnwise.config import AgenticConfig
    from turnwise.inference.server_manager import LLMServerManager
    from turnwise.runtime.event_loop import WatchedRunner


@dataclass(slots=True)
class AgenticPipeline:
    """Trains a policy on what came of its own episodes. `build.agentic.build_agentic` puts one together.

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
        """Plays, gives credit and trains, until all steps are done. A step whose groups are all filtered out trains nothing."""
        log, actor, critic, algorithm = self.log, self.actor_train, self.critic, self.algorithm
        for step in range(self.checkpoints.num_done, self.checkpoints.num_steps):
            self.model_update(step)
            self.validate(step)
            update = PolicyUpdate(actor, algorithm.loss, step, self.pipeline_config.is_streamed)
            rollout = StepRollout(self.train_rollout_scheduler, log, self.pipeline_config)
            for part in rollout:
                samples = samples_of(part.groups)
                with log.phase("ref_log_probs"):
                    log.add(self.reference.compute_log_probs(samples, into="ref_logprobs") if self.reference else ())
                with log.phase("old_log_probs_values"):
                    log.add(actor.compute_old_log_probs(samples, version=step))
                    log.add(critic.compute_values(samples) if critic else ())
                with log.phase("adv"):
                    log.add(algorithm.credit(part.groups) if part.groups else ())
                with log.phase("train"), self.checkpoints.updating(step, self.interrupts, part.is_last):
                    log.add(critic.train_step(samples, algorithm.value_loss, step) if critic and algorithm.value_loss else ())
                    log.add(update.add(samples, part.is_last))
            self.end_step(step, rollout)
        self.finish()

    @property
    def running(self) -> Stateful | None:
        """Statistics of the whole run (`running` normalisation), None where nothing uses them."""
        return self.algorithm.running

    def model_update(self, step: int) -> None:
        """Gives the trainer's weights to the inference servers as policy version `step`, where this step is to do so. The first
        and the last step of a run always do."""
        every = self.pipeline_config.actor_train.model_update_frequency
        if step % every and step not in (self.checkpoints.first_step, self.checkpoints.num_steps):
            return
        with self.log.phase("model_update"):
            self.log.add(self.event_loop.run(self.weight_transfer.update(version=step)))
            self.log.add(self.parity_gate.check(version=step))

    def validate(self, step: int) -> None:
        """Plays the fixed validation tasks with the policy as the servers have it, every `eval_steps` steps and at the end."""
        every = self.pipeline_config.eval_steps
        if self.val_rollout_scheduler is None or not every or (step % every and step != self.checkpoints.num_steps):
            return
        with self.log.phase("val"):
            groups = self.val_rollout_scheduler.get_batch(self.pipeline_config.val_batch_size)
            self.pictures.write(f"step-{step}", groups)
        self.log.add(validation_metrics(groups))

    def end_step(self, step: int, rollout: StepRollout) -> None:
        """Logs what was measured, writes what was played, and saves a checkpoint where one is due."""
        log, groups, rejected = self.log, rollout.groups, self.train_rollout_scheduler.rejected
        samples = samples_of(groups)
        log.add(rollout_metrics(groups, rejected))
        log.add(staleness_metrics(samples, version=step))
        log.add(system_metrics(samples, rollout.elapsed_s, num_trajectories=self.train_rollout_scheduler.num_episodes))
        self.journal.append(step, groups + rejected)
        if step % self.pipeline_config.logging_steps == 0:
            log.show(*log_samples(step, groups, self.tokenizer.decode))
        log.end_step(step, groups)
        if self.checkpoints.is_due:
            self.do_checkpoint()
        self.interrupts.release()

    def do_checkpoint(self) -> Path:
        """A model folder with the states of optimiser and loop after the steps that are whole."""
        with self.log.phase("checkpoint"):
            return self.checkpoints.save()

    def finish(self) -> None:
        """Validates the final policy."""
        step = self.checkpoints.num_steps
        if self.pipeline_config.uses_validation:
            self.model_update(step)
            self.validate(step)
            self.log.end_step(step)

    def close(self) -> None:
        """Closes servers, files and the event loop, each whatever becomes of the others. Safe in the middle of a step."""
        with ExitStack() as rest:
            for close in (self.folder.close, self.interrupts.restore, self.event_loop.close, self.journal.close):
                rest.callback(close)
            rest.callback(self.cluster.shutdown)
            rest.callback(lambda: self.event_loop.run(self.actor_infer.close()))
            rest.callback(self.train_rollout_scheduler.close)
            rest.callback(self.log.close)
