"""Plays the rollouts of a pipeline step and trains a role on them, all at once or in parts."""

from collections.abc import Sequence

from turnwise.algorithms.correction import staleness_metrics
from turnwise.batching.plan import denominators
from turnwise.errors import NotAvailableError
from turnwise.pipelines.log_prob_change import log_prob_change
from turnwise.pipelines.model_role import ModelRole
from turnwise.protocols import Loss, NeedsAdvantages, StepPart, StreamsStep
from turnwise.rollout.measure import rollout_metrics, system_metrics
from turnwise.rollout.source import RolloutSource
from turnwise.types import Denominators, Group, Metric, Sample, derive_seed, samples_of


class PolicyUpdate:
    """Trains `role` in one pipeline step. If all samples come at once, the role's plan splits them into
    optimiser steps. If training `is_streamed`, they come in parts that together make one optimiser step. The
    parts' undivided gradients are added up, and the sum is divided by the step's denominator at the end. Up
    to rounding, the result is that of all samples at once.

    The update is skipped if all advantages are 0 and the loss has no other gradient, since only momentum and
    weight decay would change the weights. A part whose advantages are all 0 is trained on together with the
    next part. Before pipeline step `plan.first_step` (for the actor, the end of the critic's warm-up) nothing
    is trained."""

    def __init__(
        self,
        role: ModelRole,
        loss: Loss,
        step: int,
        is_streamed: bool,
    ) -> None:
        self.role = role
        self.loss = loss
        self.step = step
        self.is_streamed = is_streamed
        self._num_updates_before = role.num_updates
        self._parts: list[Denominators] = []
        self._metrics: list[Metric] = []
        self._num_sent = 0
        self._waiting: list[Sample] = []

    def train_on(self, samples: Sequence[Sample], is_last: bool = True) -> list[Metric]:
        """Trains on the samples. The call with `is_last` changes the weights and returns the metrics of all
        calls."""
        if self.step < self.role.plan.first_step:
            return []
        samples = [*self._waiting, *samples]
        self._waiting = []
        lacks_advantages = self._lacks_advantages(samples)
        if lacks_advantages and not is_last:
            self._waiting = samples
            return []
        if lacks_advantages and not self._num_sent:
            metrics = self.role.named([Metric("grad_norm", 0.0)], has_stepped=False)
            return [*metrics, self._left_out(1.0)]
        is_one_step = self.role.plan.optimizer_steps_of(samples) <= 1
        if is_last and not self._parts and (is_one_step or not self.is_streamed):
            metrics = self.role.train_step(samples, self.loss, self.step)
            return [*metrics, self._left_out(0.0)]
        metrics = self._add_part(samples, is_last)
        if not is_last:
            return []
        return [*metrics, self._left_out(0.0)]

    def measure(self, samples: Sequence[Sample]) -> list[Metric]:
        """How far the weights' change in this pipeline step moved the policy (`log_prob_change`); [] if they
        didn't change."""
        if self.role.num_updates == self._num_updates_before:
            return []
        return log_prob_change(self.role, samples, self.step)

    def _lacks_advantages(self, samples: Sequence[Sample]) -> bool:
        """Whether the loss needs advantages, there are trained tokens, and the advantages of all of them are
        set and 0."""
        if not (isinstance(self.loss, NeedsAdvantages) and self.loss.needs_advantages):
            return False
        trained = [sample for sample in samples if sample.num_trained]
        for sample in trained:
            if sample.advantages is None or sample.advantages[sample.response_mask].any():
                return False
        return len(trained) > 0

    def _left_out(self, number: float) -> Metric:
        return Metric(f"{self.role.name.removesuffix('_train')}/updates_left_out", number, "sum")

    def _add_part(self, samples: Sequence[Sample], is_last: bool) -> list[Metric]:
        """Adds the gradient of a part. The last part makes the optimiser step and returns its metrics."""
        if not isinstance(self.loss, StreamsStep):
            name = type(self.loss).__name__
            raise NotAvailableError(
                f"{name} must see all samples of a step at once; set stream_training: false"
            )
        plan = self.role.plan
        seed = derive_seed(plan.seed, self.role.name, "part", self.step, len(self._parts))
        samples, annotation_metrics = self.role.prepare(samples, self.loss, seed)
        self._metrics += annotation_metrics
        self._parts.append(denominators(samples, plan.max_length))
        sums = Denominators(*map(sum, zip(*self._parts, strict=True)))
        whole = sums._replace(max_length=plan.max_length)
        divisor = None
        if is_last and whole.num_tokens:
            divisor = self.loss.divisor(whole)
        if divisor or any(sample.num_trained for sample in samples):
            part = StepPart(self._num_sent, divisor)
            ones = Denominators(1.0, 1.0, plan.max_length, 1.0)
            position = plan.position(self.step, number=0, num_samples=1)
            self._metrics += self.role.backward(samples, ones, self.loss, position, part)
            self._num_sent += 1
        if not is_last:
            return []
        metrics = self._metrics
        if whole.num_tokens:
            metrics = self.loss.whole(self._metrics, whole)
        return self.role.named(metrics, has_stepped=whole.num_tokens > 0)


def batch_metrics(
    groups: Sequence[Group], source: RolloutSource, step: int, elapsed_s: float
) -> list[Metric]:
    """Metrics of the batch that was played for a step; `elapsed_s` is the duration of its phase `total`."""
    samples = samples_of(groups)
    return [
        *rollout_metrics(groups, source.rejected),
        *staleness_metrics(samples, version=step),
        *system_metrics(samples, elapsed_s, num_trajectories=source.num_episodes),
    ]
