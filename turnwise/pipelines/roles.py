"""A role's model behind verbs on samples: plan micro-batches, send them to the workers, write the results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.batching.pack import pack, unpack
from turnwise.batching.plan import denominators, micro_batches, optimizer_steps
from turnwise.protocols import Loss, Output, Workers
from turnwise.types import Batch, FloatArray, Metric, Sample, derive_seed

LogprobField = Literal["old_logprobs", "ref_logprobs"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How a role cuts its samples.

    A micro-batch holds up to `max_tokens` tokens where that is set (dynamic batching), else `max_sequences` samples; this
    changes memory and speed, never results. An optimiser step takes `samples_per_step` samples.
    """

    samples_per_step: int
    max_length: int
    seed: int
    num_epochs: int = 1
    max_sequences: int = 8
    max_tokens_train: int | None = None
    max_tokens_infer: int | None = None
    deadline_s: float | None = None

    def cut(self, lengths: Sequence[int], max_tokens: int | None) -> list[list[int]]:
        if max_tokens is not None:
            return micro_batches(lengths, max_tokens=max_tokens)
        return micro_batches(lengths, max_sequences=self.max_sequences)

    def num_optimizer_steps(self, num_samples: int) -> int:
        """Optimiser steps that a batch of `num_samples` makes."""
        return self.num_epochs * -(-num_samples // self.samples_per_step)


class ModelRole:
    """`actor_train`, `reference` or `critic`, on whatever workers they run.

    `prepare` is shown all samples of an optimiser step as one batch, before its micro-batches (`protocols.PreparesStep`).
    """

    def __init__(self, name: str, workers: Workers, plan: BatchPlan, prepare: Callable[[Batch], None] | None = None) -> None:
        self.name = name
        self.workers = workers
        self.plan = plan
        self._prepare = prepare

    def compute_log_probs(self, samples: Sequence[Sample], into: LogprobField) -> None:
        """Fills `into` of every sample with this model's log-probs of its tokens."""
        for sample, values in zip(samples, self.forward(samples, "logprobs"), strict=True):
            if into == "old_logprobs":
                sample.old_logprobs = values
            else:
                sample.ref_logprobs = values

    def compute_values(self, samples: Sequence[Sample]) -> None:
        """Fills `values` of every sample with this model's value head."""
        for sample, values in zip(samples, self.forward(samples, "values"), strict=True):
            sample.values = values

    def train_step(self, samples: Sequence[Sample], loss: Loss, step: int) -> list[Metric]:
        """Trains on the samples: `num_epochs` seeded passes, each in optimiser steps of `samples_per_step`."""
        seed = derive_seed(self.plan.seed, self.name, "shuffle", step)
        metrics: list[Metric] = []
        for epoch in optimizer_steps(len(samples), self.plan.samples_per_step, seed, self.plan.num_epochs):
            for indices in epoch:
                metrics += self.optimizer_step([samples[i] for i in indices], loss)
        return metrics

    def optimizer_step(self, samples: Sequence[Sample], loss: Loss) -> list[Metric]:
        """One optimiser step on all of the samples; none where no token of them is trained on.

        The metrics of the strategy come back under this role's name, by the published spelling: `actor_train/grad_norm`, but
        `actor/lr`.
        """
        divisors = denominators(samples, self.plan.max_length)
        if divisors.num_tokens == 0:
            return [self._own(Metric("optimizer_steps", 0.0, "sum"))]
        if self._prepare is not None:
            self._prepare(pack(samples, divisors))
        cuts = self.plan.cut([s.num_tokens for s in samples], self.plan.max_tokens_train)
        batches = [pack([samples[i] for i in cut], divisors) for cut in cuts]
        metrics = self.workers.call("train_step", batches, route="split", loss=loss).result(self.plan.deadline_s)
        return [self._own(metric) for metric in (*metrics, Metric("optimizer_steps", 1.0, "sum"))]

    def _own(self, metric: Metric) -> Metric:
        if "/" in metric.name:
            return metric
        role = self.name if metric.name == "grad_norm" else self.name.removesuffix("_train")
        return metric._replace(name=f"{role}/{metric.name}")

    def forward(self, samples: Sequence[Sample], output: Output) -> list[FloatArray]:
        """One array [N] of the output for each sample, in their order."""
        cuts = self.plan.cut([s.num_tokens for s in samples], self.plan.max_tokens_infer)
        chosen = [[samples[i] for i in cut] for cut in cuts]
        batches = [pack(part, denominators(part, self.plan.max_length)) for part in chosen]
        results = self.workers.call("forward", batches, route="split", outputs=frozenset({output})).result(self.plan.deadline_s)
        by_sample: dict[int, FloatArray] = {}
        for cut, batch, arrays in zip(cuts, batches, results, strict=True):
            by_sample.update(zip(cut, unpack(arrays[output], batch.lengths), strict=True))
        return [by_sample[i] for i in range(len(samples))]
