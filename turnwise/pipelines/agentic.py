"""Agentic reinforcement learning, step by step. Begin reading at `AgenticPipeline.steps`."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from turnwise.algorithms.kl import KLController
from turnwise.config import AgenticConfig
from turnwise.inference.server_manager import LLMServerManager
from turnwise.lifecycle.by_validation import ByValidation
from turnwise.lifecycle.checkpoints import Checkpoints
from turnwise.lifecycle.interrupt import Interrupts
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.pipelines.model_role import ModelRole
from turnwise.pipelines.parity import ParityGate
from turnwise.pipelines.pictures import Pictures
from turnwise.pipelines.policy_update import PolicyUpdate, StepRollout
from turnwise.pipelines.sample_log import log_samples
from turnwise.pipelines.step_report import StepReport
from turnwise.protocols import Algorithm, Cluster, Stateful, WeightTransfer
from turnwise.rollout.journal import Journal
from turnwise.rollout.measure import validation_metrics
from turnwise.rollout.source import RolloutSource
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.tracking.run_log import RunLog
from turnwise.types import samples_of


@dataclass(slots=True)
class AgenticPipeline:
    """Trains a policy on its own episodes; `assemble.agentic.build_agentic` makes one. Attributes that ROLL's
    pipeline also has are named as in ROLL. `reference` and `critic` are None if the algorithm doesn't need
    them."""

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
    by_validation: ByValidation

    def run(self) -> None:
        """Trains until all steps are done."""
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[StepReport]:
        """Makes steps: plays, assigns credit and trains. A step trains nothing if the group filter drops all
        its groups. Yields a report of each finished step, and a final report if the run validates. A run that
        continues another folder's checkpoint with no step left saves this checkpoint in its own folder, and
        yields a final report too."""
        log, actor, critic, algorithm = self.log, self.actor_train, self.critic, self.algorithm
        if self.train_rollout_scheduler.is_exhausted:  # the run that is continued has ended with its last row
            self.checkpoints.end_here()
        while True:
            step = self.checkpoints.num_done
            self.model_update(step)
            self.validate(step)
            if step == self.checkpoints.num_steps:
                break
            update = PolicyUpdate(actor, algorithm.loss, step, self.pipeline_config.is_streamed)
            rollout = StepRollout(self.train_rollout_scheduler, log, self.pipeline_config)
            for part in rollout:
                samples = samples_of(part.groups)
                with log.phase("ref_log_probs"):
                    log.add(
                        self.reference.compute_log_probs(samples, into="ref_logprobs")
                        if self.reference
                        else ()
                    )
                with log.phase("old_log_probs_values"):
                    log.add(actor.compute_old_log_probs(samples, version=step))
                    log.add(critic.compute_values(samples) if critic else ())
                with log.phase("adv"):
                    log.add(algorithm.credit(part.groups) if part.groups else ())
                with log.phase("train"), self.checkpoints.updating(step, self.interrupts, part.is_last):
                    log.add(
                        critic.train_step(samples, algorithm.value_loss, step)
                        if critic and algorithm.value_loss
                        else ()
                    )
                    log.add(update.train_on(samples, part.is_last))
                log.add(update.measure(samples) if part.is_last else ())
            yield self.end_step(step, rollout)
        if self.pipeline_config.uses_validation or not self.checkpoints.is_saved:
            yield self.end_step(step)

    @property
    def running(self) -> Stateful | None:
        """The algorithm's statistics over the whole run (`running` normalisation); None if the algorithm
        keeps none."""
        return self.algorithm.running

    def model_update(self, step: int) -> None:
        """Sends the trainer's weights to the servers as policy version `step`, if an update is due: at the
        run's first step, every `model_update_frequency` steps, and after the last step only if the run
        validates."""
        config, is_last = self.pipeline_config, step == self.checkpoints.num_steps
        is_asked = (
            step == self.checkpoints.first_step or step % config.actor_train.model_update_frequency == 0
        )
        if not (config.uses_validation if is_last else is_asked):
            return
        with self.log.phase("model_update"):
            self.log.add(self.event_loop.run(self.weight_transfer.update(version=step)))
            self.log.add(self.parity_gate.check(version=step))

    def validate(self, step: int) -> None:
        """Plays the validation tasks if `step` is a multiple of `eval_steps`, or all steps are done.
        `eval_steps` 0 = never."""
        every = self.pipeline_config.eval_steps
        if (
            self.val_rollout_scheduler is None
            or not every
            or (step % every and step != self.checkpoints.num_steps)
        ):
            return
        with self.log.phase("val"):
            groups = self.val_rollout_scheduler.get_batch(self.pipeline_config.val_batch_size)
            self.pictures.write(f"step-{step}", groups)
        self.log.add(self.by_validation.see(step, validation_metrics(groups), self.checkpoints))

    def end_step(self, step: int, rollout: StepRollout | None = None) -> StepReport:
        """Logs metrics, writes trajectories, and saves a checkpoint if one is due. `rollout` is None for the
        final report."""
        log, groups = self.log, rollout.groups if rollout else []
        if rollout:
            log.add(rollout.measure(step))
            self.journal.append(step, groups + rollout.source.rejected)
            if step % self.pipeline_config.logging_steps == 0:
                log.show(*log_samples(step, groups, self.tokenizer.decode))
        metrics = log.end_step(step, groups)
        if rollout and rollout.source.is_exhausted:
            self.checkpoints.end_here()
        checkpoint = self.do_checkpoint() if self.checkpoints.is_due else None
        self.interrupts.release()
        return StepReport(
            step + 1 if rollout else step, metrics, groups, checkpoint, is_final=rollout is None
        )

    def do_checkpoint(self) -> Path:
        """Saves a checkpoint of the last finished step, and returns its folder."""
        with self.log.phase("checkpoint"):
            return self.checkpoints.save()

    def close(self) -> None:
        """Closes servers, files and the event loop, each even if another fails. Safe in the middle of a
        step."""
        with ExitStack() as rest:
            for close in (
                self.folder.close,
                self.interrupts.restore,
                self.event_loop.close,
                self.journal.close,
            ):
                rest.callback(close)
            rest.callback(self.cluster.shutdown)
            rest.callback(lambda: self.event_loop.run(self.actor_infer.close()))
            rest.callback(self.train_rollout_scheduler.close)
            rest.callback(self.log.close)
