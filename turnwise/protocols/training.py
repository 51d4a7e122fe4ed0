"""The contracts of what trains: losses, strategies, algorithms, and parts of a run whose state is saved."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from turnwise.runtime.info import MemoryKind, StrategyInfo
from turnwise.types import (
    Batch,
    Denominators,
    Group,
    Metric,
    ModelOutputs,
    TokenAnnotations,
)

Output = Literal["logprobs", "full_logprobs", "entropy", "values", "next_values"]
"""For each token: its log-prob over its kept ids (those that top-k, top-p or min-p left) and over the whole
vocabulary, the entropy of its distribution, and the values of the states before and after it."""


class Loss(Protocol):
    """The function that a strategy minimises. It returns a *sum already divided by the step's denominators*,
    so that losses and gradients of micro-batches and ranks add up."""

    outputs: frozenset[Output]
    """The outputs of the forward pass that the loss needs."""

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Any, list[Metric]]: ...


class StepPart(NamedTuple):
    """Says which part of an optimiser step a call of `train_step` computes, if the step's samples come in
    parts."""

    number: int = 0
    """Counts from 0. Part 0 discards what an unfinished earlier step left behind."""
    divisor: float | None = 1.0
    """Divisor of the gradients summed over all parts, given with the last part. None = more parts come."""


WHOLE_STEP = StepPart()

SavedForm = Literal["training", "model", "training and model"]
"""What `TrainStrategy.save` writes: the state from which training continues, a plain Hugging Face folder, or
both. A strategy whose training state has a plain folder anyway writes no second one."""


class TrainStrategy(Protocol):
    """One role's model and optimiser on this rank. It doesn't know the algorithm."""

    def forward(
        self, batches: Sequence[Batch], outputs: frozenset[Output], without_adapter: bool = False
    ) -> list[dict[str, Any]]:
        """For each batch the `outputs` by name: numpy arrays [N], without gradients. No logits leave the
        strategy, since the vocabulary may be sharded. `without_adapter` turns the LoRA adapter off, so that
        the base model serves as reference."""

    def train_step(
        self, micro_batches: Sequence[Batch], loss: Loss, position: float = 0.0, part: StepPart = WHOLE_STEP
    ) -> list[Metric]:
        """Makes one optimiser step over the *list* of its micro-batches, since pipeline schedules and engines
        with their own accumulation and clipping need them together. If the step comes in parts, adds
        gradients up until the last `part`. `position` in the learning-rate schedule counts the optimiser
        steps planned before (docs/design/training.md)."""

    def weights(self) -> Iterator[tuple[str, Any]]:
        """`(Hugging Face name, tensor)` of every parameter, with adapters merged in and sharded parameters
        made whole."""

    def save(self, folder: Path, form: SavedForm = "training") -> None:
        """Writes the training state, a plain model folder, or both. If each rank holds the whole model, only
        the first rank is called, so that it can save after another rank has died. If the model is sharded,
        all ranks are called, and each writes its share."""

    def load(self, folder: Path) -> None: ...

    def offload(self, kinds: Iterable[MemoryKind]) -> None: ...

    def onload(self, kinds: Iterable[MemoryKind]) -> None: ...

    def info(self) -> StrategyInfo:
        """What the strategy really runs, which may differ from the config."""


class Stateful(Protocol):
    """A part of a run whose state is saved in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """The state, made of values that JSON can hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Algorithm(Protocol):
    """Credit assignment and loss of one method. A new method needs a file of its own and an entry in `spec`.
    A class that a config names as `module:Class` is called with `(settings, kl_controller)`."""

    needs: frozenset[str]
    """Which of `old_logprobs`, `ref_logprobs`, `values`, `greedy_sibling` the method needs."""
    loss: Loss
    """The policy's loss, a separate object, so that it can be sent to the ranks of a strategy."""
    value_loss: Loss | None
    """The critic's loss, None for a method without a critic."""
    running: Stateful | None
    """Statistics of the whole run (`running` normalisation), None if unused."""

    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        """Writes `advantages`, and with a critic `returns`, into every Sample of the groups. Returns
        metrics."""


@runtime_checkable
class StreamsStep(Protocol):
    """A loss whose optimiser step may come in parts. The loss is a sum with one term per sample, divided by
    *one* denominator of the step. In a part's batches all denominators but `max_length` are 1, since those of
    the step aren't known yet. `NeedsWholeStep.prepare` is called for each part."""

    def divisor(self, denominators: Denominators) -> float:
        """The divisor of the summed gradients of the parts."""

    def whole(self, metrics: Sequence[Metric], denominators: Denominators) -> list[Metric]:
        """The metrics of the whole step, from those of its parts."""


@runtime_checkable
class NeedsAdvantages(Protocol):
    """A loss that tells whether an update in which all advantages are 0 would change anything."""

    @property
    def needs_advantages(self) -> bool:
        """Whether the gradient is 0 if all advantages are 0. If True, an update whose advantages are all 0 is
        skipped."""


@runtime_checkable
class NeedsWholeStep(Protocol):
    """A loss that chooses, masks or weights single tokens by looking at the whole optimiser step."""

    def prepare(self, step_batch: Batch, seed: int) -> tuple[TokenAnnotations, list[Metric]]:
        """Returns annotations of the tokens of the next optimiser step, numpy arrays [N], and metrics.

        `pipelines.model_role` calls this in the pipeline's process, once per optimiser step or streamed
        part, each time with another `seed`. `step_batch` packs all samples of the step or part as numpy
        arrays. The annotations go with their tokens into the micro-batches, whose denominators count the
        kept tokens. The loss itself has no state."""
