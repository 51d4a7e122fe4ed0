"""Agentic reinforcement learning, step by step. Begin reading at `AgenticPipeline.steps`.

A step goes through these phases, in this order. `time/step_PHASE` is how long each took.

    phase                   consumes                     makes                       waits for
    --------------------------------------------------------------------------------------------------------
    model_update            weights of the trainer       policy version `step`       requests at the servers
    val                     validation tasks             metrics `val/…`             the slowest episode
    total, over all parts of the batch (several if training is streamed):
      rollout               tasks, sampled tokens        groups of trajectories      the slowest group, or
                                                                                     nothing: played ahead
      ref_log_probs         tokens                       reference's log-probs       ranks of the reference
      old_log_probs_values  tokens                       old log-probs, values       policy and critic ranks
      adv                   rewards, log-probs, values   advantages, returns         nothing
      train                 tokens, advantages           gradients, then new weights critic and policy ranks
    log                     metrics of all phases        a record in each tracker    the disk
    checkpoint              weights, optimisers, states  a folder `checkpoint-N`     ranks and the disk
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
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
from turnwise.pipelines.policy_update import PolicyUpdate, batch_metrics
from turnwise.pipelines.sample_log import log_samples
from turnwise.pipelines.step_report import StepReport
from turnwise.protocols import Algorithm, Cluster, Stateful, WeightTransfer
from turnwise.rollout.journal import Journal
from turnwise.rollout.measure import validation_metrics
from turnwise.rollout.source import Part, RolloutSource
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.tracking.run_log import RunLog
from turnwise.types import Group, Metric, samples_of


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
    give_devices_back: Callable[[], list[Metric]] = list
    """Called before episodes are awaited: gives the replicas that made room for training their devices."""

    def run(self) -> None:
        """Trains until all steps are done."""
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[StepReport]:
        """Makes steps: plays, assigns credit and trains. A step trains nothing if the group filter drops all
        its groups. Yields a report of each finished step, and a final report if the run validates. A run that
        continues another folder's checkpoint with no step left saves this checkpoint in its own folder, and
        yields a final report too."""
        config = self.pipeline_config
        log = self.log
        source = self.train_rollout_scheduler
        while True:
            step = self.checkpoints.num_done
            if self._is_update_due(step):
                with log.phase("model_update"):
                    log.add(self.model_update(step))
            log.add(self.give_devices_back())
            if self._is_validation_due(step):
                with log.phase("val"):
                    validated = self.play_validation(step)
                log.add(self.by_validation.see(step, validation_metrics(validated), self.checkpoints))
            if self.is_over:
                break
            update = PolicyUpdate(self.actor_train, self.algorithm.loss, step, config.is_streamed)
            parts = source.parts(config.rollout_batch_size, config.is_streamed)
            groups: list[Group] = []
            with closing(parts), log.phase("total") as total:
                is_complete = False
                while not is_complete:
                    with log.phase("rollout"):
                        part = next(parts)
                    groups += part.groups
                    self.train_on(part, update)
                    is_complete = part.is_last
            log.add(batch_metrics(groups, source, step, total.elapsed_s))
            self.journal.append(step, groups + source.rejected)
            if step % config.logging_steps == 0:
                log.show(*log_samples(step, groups, self.tokenizer.decode))
            yield self.end_step(step, groups)
        if config.uses_validation or not self.checkpoints.is_saved:
            yield self.end_step(step)

    @property
    def is_over(self) -> bool:
        """Whether the run makes no further step: all steps are done, early stopping or a callback has ended
        it (`Checkpoints.end_here`), or the tasks of its last epoch are used up."""
        return self.checkpoints.is_complete or self.train_rollout_scheduler.is_exhausted

    @property
    def running(self) -> Stateful | None:
        """The algorithm's statistics over the whole run (`running` normalisation); None if the algorithm
        keeps none."""
        return self.algorithm.running

    def _is_update_due(self, step: int) -> bool:
        """Whether the servers get the weights now: at the run's first step, every `model_update_frequency`
        steps, and after the last step only if the run validates."""
        if self.is_over:
            return self.pipeline_config.uses_validation
        is_first = step == self.checkpoints.first_step
        return is_first or step % self.pipeline_config.actor_train.model_update_frequency == 0

    def model_update(self, step: int) -> list[Metric]:
        """Sends the trainer's weights to the servers as policy version `step`, and compares the log-probs of
        both."""
        metrics = self.event_loop.run(self.weight_transfer.update(version=step))
        return [*metrics, *self.parity_gate.check(version=step)]

    def _is_validation_due(self, step: int) -> bool:
        """Whether the validation tasks are played now: every `eval_steps` steps (0 = never), and after the
        last one."""
        every = self.pipeline_config.eval_steps
        if self.val_rollout_scheduler is None or not every:
            return False
        return step % every == 0 or self.is_over

    def play_validation(self, step: int) -> list[Group]:
        """The played validation tasks."""
        assert self.val_rollout_scheduler is not None
        groups = self.val_rollout_scheduler.get_batch(self.pipeline_config.val_batch_size)
        self.pictures.write(f"step-{step}", groups)
        return groups

    def train_on(self, part: Part, update: PolicyUpdate) -> None:
        """Assigns credit to a part of the batch and trains on it. With the batch's last part the step is
        finished."""
        log = self.log
        critic = self.critic
        algorithm = self.algorithm
        samples = samples_of(part.groups)
        with log.phase("ref_log_probs"):
            if self.reference:
                log.add(self.reference.compute_log_probs(samples, into="ref_logprobs"))
        with log.phase("old_log_probs_values"):
            log.add(self.actor_train.compute_old_log_probs(samples, version=update.step))
            if critic:
                log.add(critic.compute_values(samples))
        with log.phase("adv"):
            if part.groups:
                log.add(algorithm.credit(part.groups))
        with log.phase("train"), self.checkpoints.updating(update.step, self.interrupts, part.is_last):
            if critic and algorithm.value_loss:
                log.add(critic.train_step(samples, algorithm.value_loss, update.step))
            log.add(update.train_on(samples, part.is_last))
        if part.is_last:
            log.add(update.measure(samples))

    def end_step(self, step: int, groups: list[Group] | None = None) -> StepReport:
        """Hands the metrics to the trackers, and saves a checkpoint if one is due. Without `groups` it ends
        the run: this is the final report."""
        is_final = groups is None
        groups = groups or []
        metrics = self.log.end_step(step, groups)
        checkpoint = self.do_checkpoint() if self.checkpoints.is_due(self.is_over) else None
        self.interrupts.release()
        num_done = step if is_final else step + 1
        return StepReport(num_done, metrics, groups, checkpoint, is_final)

    def do_checkpoint(self) -> Path:
        """Saves a checkpoint of the last finished step, and returns its folder."""
        with self.log.phase("checkpoint"):
            return self.checkpoints.save()

    def close(self) -> None:
        """Closes servers, files and the event loop, each even if another fails. Safe in the middle of a
        step."""
        with ExitStack() as stack:  # closes in reverse order
            stack.callback(self.folder.close)
            stack.callback(self.interrupts.restore)
            stack.callback(self.event_loop.close)
            stack.callback(self.journal.close)
            stack.callback(self.cluster.shutdown)
            stack.callback(lambda: self.event_loop.run(self.actor_infer.close()))
            stack.callback(self.train_rollout_scheduler.close)
            stack.callback(self.log.close)
