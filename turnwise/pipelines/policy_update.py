"""Updates a role's weights in one step, from samples that come all at once or in parts."""

from collections.abc import Sequence

from turnwise.batching.plan import denominators
from turnwise.errors import NotAvailableError
from turnwise.pipelines.roles import ModelRole
from turnwise.protocols import Loss, NeedsAdvantages, StepPart, StreamsStep
from turnwise.types import Denominators, Metric, Sample, derive_seed


class PolicyUpdate:
    """Trains `role` in one step of the pipeline. If all samples come at once, the role's plan cuts them into optimiser steps.
    If training `is_streamed`, they come in parts that together make one optimiser step: their gradients are computed with
    denominators of 1, added up, and divided by the step's own denominator at the end. The result is the gradient of all samples
    at once, summed in another order.

    The update is skipped if no token has an advantage and the loss has no other gradient: it would compute zeros and move the
    weights only by momentum and weight decay. Parts without an advantage wait for a part with one. Before the role's first step
    (`plan.first_step`, the critic's warm-up) nothing is trained.
    """

    def __init__(self, role: ModelRole, loss: Loss, step: int, is_streamed: bool) -> None:
        self.role = role
        self.loss = loss
        self.step = step
        self.is_streamed = is_streamed
        self._parts: list[Denominators] = []
        self._metrics: list[Metric] = []
        self._num_sent = 0
        self._waiting: list[Sample] = []

    def add(self, samples: Sequence[Sample], is_last: bool = True) -> list[Metric]:
        """Trains on the samples. The call with the last ones changes the weights and returns all metrics."""
        if self.step < self.role.plan.first_step:
            return []
        samples, self._waiting = [*self._waiting, *samples], []
        if self._lacks_advantages(samples) and not is_last:
            self._waiting = samples
            return []
        if self._lacks_advantages(samples) and not self._parts:
            return [*self.role.named([Metric("grad_norm", 0.0)], has_stepped=False), self._left_out(1.0)]
        is_one_step = self.role.plan.num_optimizer_steps(len(samples)) <= 1
        if is_last and not self._parts and (is_one_step or not self.is_streamed):
            return [*self.role.train_step(samples, self.loss, self.step), self._left_out(0.0)]
        metrics = self._add_part(samples, is_last)
        return [*metrics, self._left_out(0.0)] if is_last else []

    def _lacks_advantages(self, samples: Sequence[Sample]) -> bool:
        """Whether no token has an advantage and the loss needs one."""
        if not (isinstance(self.loss, NeedsAdvantages) and self.loss.needs_advantages):
            return False
        trained = [sample for sample in samples if sample.num_trained]
        known = [sample.advantages[sample.response_mask] for sample in trained if sample.advantages is not None]
        return len(known) == len(trained) > 0 and not any(advantages.any() for advantages in known)

    def _left_out(self, number: float) -> Metric:
        return Metric(f"{self.role.name.removesuffix('_train')}/updates_left_out", number, "sum")

    def _add_part(self, samples: Sequence[Sample], is_last: bool) -> list[Metric]:
        """Adds the gradient of a part. The last one makes the optimiser step and returns its metrics."""
        if not isinstance(self.loss, StreamsStep):
            name = type(self.loss).__name__
            raise NotAvailableError(f"{name} must see all samples of a step at once; set stream_training: false")
        plan = self.role.plan
        seed = derive_seed(plan.seed, self.role.name, "part", self.step, len(self._parts))
        samples, measured = self.role.prepare(samples, self.loss, seed)
        self._metrics += measured
        self._parts.append(denominators(samples, plan.max_length))
        step = Denominators(*map(sum, zip(*self._parts, strict=True)))._replace(max_length=plan.max_length)
        divisor = self.loss.divisor(step) if is_last and step.num_tokens else None
        if divisor or any(sample.num_trained for sample in samples):
            part, ones = StepPart(self._num_sent, divisor), Denominators(1.0, 1.0, plan.max_length, 1.0)
            position = plan.position(self.step, number=0, num_samples=1)
            self._metrics += self.role.backward(samples, ones, self.loss, position, part)
            self._num_sent += 1
        if not is_last:
            return []
        metrics = self.loss.whole(self._metrics, step) if step.num_tokens else self._metrics
        return self.role.named(metrics, has_stepped=step.num_tokens > 0)
