"""A role's model. Its methods send micro-batches of samples to the workers, and write the results into the
samples."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from turnwise.batching.pack import blank, pack, unpack
from turnwise.batching.plan import (
    deal,
    denominators,
    episode_tokens,
    episodes,
    micro_batches,
    optimizer_steps,
)
from turnwise.protocols import (
    WHOLE_STEP,
    Loss,
    MemoryKind,
    NeedsWholeStep,
    Output,
    Pending,
    StepPart,
    Workers,
)
from turnwise.runtime.stopwatch import Stopwatch, Work
from turnwise.spec import OldLogProbs
from turnwise.types import Batch, Denominators, FloatArray, Metric, Sample, derive_seed

LogprobField = Literal["old_logprobs", "ref_logprobs"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How a role splits its samples. An optimiser step has `samples_per_step` samples; an episode that was
    cut into several samples counts as one, and they stay in one step. A micro-batch has at most
    `max_tokens_train` or `max_tokens_infer` tokens if that is set (dynamic batching), else at most
    `max_sequences` samples. Micro-batches change memory and speed, never results. `max_length` is the longest
    context in tokens."""

    samples_per_step: int
    max_length: int
    seed: int
    num_epochs: int = 1
    max_sequences: int = 8
    max_tokens_train: int | None = None
    max_tokens_infer: int | None = None
    samples_per_batch: int | None = None
    """Number of samples per batch (one per trajectory) that the learning-rate schedule assumes; None = the
    actual number."""
    first_step: int = 0
    """The first pipeline step in which the role is trained."""

    def cut(self, samples: Sequence[Sample], max_tokens: int | None, num_ranks: int = 1) -> list[list[int]]:
        """Sample indices of each micro-batch, those of the first rank first. All ranks have the same number
        of micro-batches; some may be empty. Samples with a common prefix are adjacent, so that the prefix is
        computed once."""
        limits = {"max_sequences": self.max_sequences}
        if max_tokens is not None:
            limits = {"max_tokens": max_tokens}
        ranks: list[list[list[int]]] = []
        for dealt in deal(samples, num_ranks):
            dealt.sort(key=lambda index: samples[index].token_ids.tobytes())
            lengths = [samples[index].num_tokens for index in dealt]
            parts = micro_batches(lengths, **limits, order=range(len(dealt)))
            ranks.append([[dealt[place] for place in part] for part in parts])
        num_parts = max(len(parts) for parts in ranks)
        cuts: list[list[int]] = []
        for parts in ranks:
            empty: list[list[int]] = [[]] * (num_parts - len(parts))
            cuts += [*parts, *empty]
        return cuts

    def optimizer_steps_of(self, samples: Sequence[Sample]) -> int:
        """Number of optimiser steps on a batch, over all epochs."""
        return self.num_optimizer_steps(len(episodes(samples)))

    def num_optimizer_steps(self, num_samples: int) -> int:
        """Number of optimiser steps on a batch of `num_samples` uncut episodes, over all epochs."""
        return self.num_epochs * -(-num_samples // self.samples_per_step)

    def position(self, step: int, number: int, num_samples: int) -> float:
        """Position in the learning-rate schedule of optimiser step `number` (from 0) of a pipeline step. Each
        pipeline step advances the schedule by the planned number of optimiser steps, even if its
        `num_samples` make more or fewer.

        >>> plan = BatchPlan(samples_per_step=4, max_length=64, seed=0, samples_per_batch=8)
        >>> [plan.position(5, number, num_samples=8) for number in range(2)]
        [10.0, 11.0]
        >>> [plan.position(5, number, num_samples=16) for number in range(4)]
        [10.0, 10.5, 11.0, 11.5]
        """
        planned = self.num_optimizer_steps(self.samples_per_batch or num_samples)
        actual = self.num_optimizer_steps(num_samples)
        return (step - self.first_step) * planned + number * planned / actual


ClaimDevices = Callable[[str, Collection[MemoryKind] | None], None]
UseDevices = Callable[[str], AbstractContextManager[Any]]


@dataclass(eq=False)
class ModelRole:
    """A role, such as `actor_train`, `reference` or `critic`, on its workers. If `is_base`, its model is the
    workers' base model without the LoRA adapter. `stopwatch` is that of the workers; it counts micro-batches
    and tokens."""

    name: str
    workers: Workers
    plan: BatchPlan
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    is_base: bool = False
    old_log_probs: OldLogProbs = "if_needed"
    owner: str = ""
    """The role whose device memory these workers use; "" = this one."""
    is_sharded: bool = False
    """Whether each rank holds only a share of what is trained."""
    num_updates: int = field(default=0, init=False)
    """Number of optimiser steps whose results have come back."""
    claim_devices: ClaimDevices | None = field(default=None, init=False)
    """Called before the workers compute; None if roles don't share devices."""
    use_devices: UseDevices = field(default=nullcontext, init=False)
    """Around the workers' work: measures how long the devices of a role, by its name, are used."""

    def __post_init__(self) -> None:
        self.owner = self.owner or self.name
        self.is_sharded = self.is_sharded and self.workers.size > 1

    def without_adapter(self, name: str, plan: BatchPlan) -> "ModelRole":
        """The base model under this role's LoRA adapter, as another role on the same workers. Its metrics
        carry `name`."""
        return ModelRole(
            name,
            self.workers,
            plan,
            self.stopwatch,
            is_base=True,
            owner=self.owner,
        )

    def call_full_model(self, method: str, *args: Any) -> Pending:
        """Calls a method that needs the whole model on the first rank. The other ranks take part if they hold
        shares of it."""
        if self.is_sharded:
            return self.workers.call(method, *args, route="broadcast")
        return self.workers.call(method, *args, route="rank0")

    def compute_log_probs(self, samples: Sequence[Sample], into: LogprobField) -> list[Metric]:
        """Sets the field `into` of every sample to this model's log-probs of its tokens. Returns the metrics
        of the passes."""
        outputs: set[Output] = {"logprobs"}
        if any(sample.kept_ids is not None for sample in samples):
            outputs.add("full_logprobs")
        results, metrics = self._forward(samples, frozenset(outputs))
        for sample, arrays in zip(samples, results, strict=True):
            if into == "old_logprobs":
                sample.old_logprobs = arrays["logprobs"]
                sample.old_full_logprobs = arrays.get("full_logprobs")
            else:
                sample.ref_logprobs = arrays.get("full_logprobs", arrays["logprobs"])
        return metrics

    def compute_old_log_probs(self, samples: Sequence[Sample], version: int) -> list[Metric]:
        """Sets `old_logprobs`, the log-probs of the policy at the start of an update, as the setting
        `old_log_probs` says. With `if_needed` they are left out for a single optimiser step on samples of the
        current policy, `version`: its own forward pass computes the same numbers, and without `old_logprobs`
        the loss takes the ratio to be 1."""
        if self.old_log_probs == "rollouts":
            for sample in samples:
                sample.old_logprobs = sample.rollout_logprobs
            return []
        runs = (run for sample in samples for runs_of_turn in sample.versions for run in runs_of_turn)
        is_stale = any(run.version != version for run in runs)
        has_several_steps = self.plan.optimizer_steps_of(samples) > 1
        if is_stale or has_several_steps or self.old_log_probs == "always":
            return self.compute_log_probs(samples, into="old_logprobs")
        return []

    def compute_values(self, samples: Sequence[Sample]) -> list[Metric]:
        """Sets `values` and `next_values` of every sample by this model's value head. Returns the metrics of
        the passes."""
        results, metrics = self._forward(samples, frozenset({"values", "next_values"}))
        for sample, arrays in zip(samples, results, strict=True):
            sample.values = arrays["values"]
            sample.next_values = arrays["next_values"]
        return metrics

    def train_step(self, samples: Sequence[Sample], loss: Loss, step: int) -> list[Metric]:
        """Trains on the samples of pipeline step `step`: `num_epochs` shuffled passes, each split into
        optimiser steps."""
        seed = derive_seed(self.plan.seed, self.name, "shuffle", step)
        metrics: list[Metric] = []
        parts = episodes(samples)
        plan = optimizer_steps(len(parts), self.plan.samples_per_step, seed, self.plan.num_epochs)
        chunks = [
            [samples[index] for number in step_parts for index in parts[number]]
            for epoch in plan
            for step_parts in epoch
        ]
        if len(chunks) > 1:
            cuts = [self._cut(chunk, self.plan.max_tokens_train) for chunk in chunks]
            self.stopwatch.work = Work("micro-batches", sum(map(len, cuts)))
        for number, chunk in enumerate(chunks):
            position = self.plan.position(step, number, len(parts))
            metrics += self.optimizer_step(chunk, loss, position, derive_seed(seed, number))
        return metrics

    def optimizer_step(
        self,
        samples: Sequence[Sample],
        loss: Loss,
        position: float,
        seed: int = 0,
    ) -> list[Metric]:
        """Makes one optimiser step on all of the samples, or none if the loss counts none of their tokens.
        `position` in the schedule sets the learning rate; `seed` seeds the loss's random draws. Returns
        metrics as `named` names them."""
        samples, metrics = self.prepare(samples, loss, seed)
        divisors = denominators(samples, self.plan.max_length)
        if divisors.num_tokens:
            metrics += self.backward(samples, divisors, loss, position)
        return self.named(metrics, has_stepped=divisors.num_tokens > 0)

    def backward(
        self,
        samples: Sequence[Sample],
        divisors: Denominators,
        loss: Loss,
        position: float,
        part: StepPart = WHOLE_STEP,
    ) -> list[Metric]:
        """Lets the workers make an optimiser step, or a part of one, on the samples. Returns unnamed metrics
        (see `named`)."""
        cuts = self._cut(samples, self.plan.max_tokens_train)
        batches = _packed(samples, cuts, divisors)
        with self._computing("train", len(batches)) as batch_metrics:
            results: list[Metric] = self.workers.call(
                "train_step",
                batches,
                route="split",
                loss=loss,
                position=position,
                part=part,
            ).result()
        self.num_updates += part.divisor is not None
        return [*results, *batch_metrics]

    def prepare(
        self, samples: Sequence[Sample], loss: Loss, seed: int
    ) -> tuple[Sequence[Sample], list[Metric]]:
        """The samples, or copies with the annotations that a `NeedsWholeStep` loss makes, and the metrics of
        its `prepare`."""
        divisors = denominators(samples, self.plan.max_length)
        if not isinstance(loss, NeedsWholeStep) or not divisors.num_tokens:
            return samples, []
        step_batch = pack(samples, divisors)
        annotations, metrics = loss.prepare(step_batch, seed)
        fields: list[dict[str, Any]] = [{} for _ in samples]
        for name, array in annotations._asdict().items():
            if array is None:
                continue
            parts = unpack(array, step_batch.lengths)
            for of_sample, part in zip(fields, parts, strict=True):
                of_sample[name] = part
        annotated = [replace(sample, **of_sample) for sample, of_sample in zip(samples, fields, strict=True)]
        return annotated, metrics

    def named(self, metrics: Sequence[Metric], has_stepped: bool) -> list[Metric]:
        """The metrics of an optimiser step, and `backward_steps`: 1 if `has_stepped`, else 0. A name without
        `/` gets the role's name as a prefix, without `_train` except for the gradient norm:
        `actor_train/grad_norm`, but `actor/lr`."""
        short = self.name.removesuffix("_train")
        prefixed: list[Metric] = []
        for metric in (*metrics, Metric("backward_steps", float(has_stepped), "sum")):
            if "/" not in metric.name:
                prefix = self.name if metric.name == "grad_norm" else short
                metric = metric._replace(name=f"{prefix}/{metric.name}")
            prefixed.append(metric)
        return prefixed

    def outputs(
        self, samples: Sequence[Sample], outputs: frozenset[Output]
    ) -> list[dict[Output, FloatArray]]:
        """Several of the model's `outputs` for each sample: arrays [N] over its N tokens."""
        results, _ = self._forward(samples, outputs)
        return results

    def forward(self, samples: Sequence[Sample], output: Output) -> list[FloatArray]:
        """The model's `output` (such as `logprobs`) for each sample: an array [N] over its N tokens."""
        results, _ = self._forward(samples, frozenset({output}))
        return [arrays[output] for arrays in results]

    async def forward_async(self, samples: Sequence[Sample], output: Output) -> list[FloatArray]:
        """`forward` on the event loop, which keeps running if the workers are in other processes. It doesn't
        claim devices."""
        outputs: frozenset[Output] = frozenset({output})
        cuts, batches = self._batches(samples)
        arrays = await self._begin_forward(batches, outputs)
        results = _by_sample(len(samples), cuts, batches, arrays, outputs)
        return [arrays[output] for arrays in results]

    def _cut(self, samples: Sequence[Sample], max_tokens: int | None) -> list[list[int]]:
        return self.plan.cut(samples, max_tokens, self.workers.dp_size)

    def _forward(
        self, samples: Sequence[Sample], outputs: frozenset[Output]
    ) -> tuple[list[dict[Output, FloatArray]], list[Metric]]:
        cuts, batches = self._batches(samples)
        with self._computing("forward", len(batches), ["weights"]) as metrics:
            results = self._begin_forward(batches, outputs).result()
        return _by_sample(len(samples), cuts, batches, results, outputs), metrics

    def _batches(self, samples: Sequence[Sample]) -> tuple[list[list[int]], list[Batch]]:
        """The micro-batches of a forward pass, and the indices of the samples of each."""
        cuts = self._cut(samples, self.plan.max_tokens_infer)
        parts = _parts(samples, cuts)
        return cuts, [pack(part, denominators(part, self.plan.max_length)) for part in parts]

    def _begin_forward(self, batches: Sequence[Batch], outputs: frozenset[Output]) -> Pending:
        options: dict[str, Any] = {"outputs": outputs}
        if self.is_base:
            options["without_adapter"] = True
        return self.workers.call("forward", batches, route="split", **options)

    @contextmanager
    def _computing(
        self, kind: str, num_batches: int, memory: Collection[MemoryKind] | None = None
    ) -> Iterator[list[Metric]]:
        """Prepares the workers for a call on `num_batches` micro-batches: claims devices for these kinds of
        `memory` (None = all). After the call, the yielded list has the call's metrics: its tokens' shares of
        padding and of merged prefixes."""
        work = self.stopwatch.work
        if work.finished >= work.total:
            self.stopwatch.work = Work("micro-batches", num_batches)
        if self.claim_devices is not None:
            self.claim_devices(self.owner, memory)
        metrics: list[Metric] = []
        start = self.stopwatch.tokens
        with self.use_devices(self.owner):
            yield metrics
        counts = self.stopwatch.tokens.minus(start)
        if counts.computed:
            name = f"batch/{self.name}/{kind}"
            metrics += [
                Metric(f"{name}/padding", counts.padding_share, weight=counts.computed),
                Metric(f"{name}/merged", counts.merged_share, weight=counts.unmerged),
            ]


def _packed(samples: Sequence[Sample], cuts: Sequence[Sequence[int]], divisors: Denominators) -> list[Batch]:
    """The micro-batches of an optimiser step on the samples."""
    parts = _parts(samples, cuts)
    if all(sample.episode is None for sample in samples):
        return [pack(part, divisors) for part in parts]
    totals = episode_tokens(samples)
    counts = ([totals[index] for index in cut] or [0] for cut in cuts)
    return [pack(part, divisors, count) for part, count in zip(parts, counts, strict=True)]


def _parts(samples: Sequence[Sample], cuts: Sequence[Sequence[int]]) -> list[list[Sample]]:
    """The samples of each micro-batch. One without samples gets a blank sample."""
    return [[samples[index] for index in cut] or [blank(samples[0])] for cut in cuts]


def _by_sample(
    num_samples: int,
    cuts: Sequence[Sequence[int]],
    batches: Sequence[Batch],
    results: Sequence[Mapping[Output, Any]],
    outputs: frozenset[Output],
) -> list[dict[Output, FloatArray]]:
    """The outputs of micro-batches, divided among their samples."""
    by_sample: list[dict[Output, FloatArray]] = [{} for _ in range(num_samples)]
    for cut, batch, arrays in zip(cuts, batches, results, strict=True):
        for name in outputs:
            of_samples = unpack(arrays[name], batch.lengths)
            # A micro-batch without samples holds one blank sample.
            for index, array in zip(cut, of_samples, strict=bool(cut)):
                by_sample[index][name] = array
    return by_sample
