"""What strategies have in common, whichever engine trains: schedule, loss scale, stopwatch, description, the
order of an optimiser step, and that of saving and loading. There is no model here."""

import logging
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from turnwise.errors import ModelError, NotAvailableError
from turnwise.models.shares import MAX_FILE_BYTES, Shares, open_shares
from turnwise.protocols import WHOLE_STEP, Loss, MemoryKind, Output, SavedForm, StepPart
from turnwise.runtime.info import StrategyInfo
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import TokenCounts
from turnwise.spec import STRATEGIES
from turnwise.training.model_source import ModelSource
from turnwise.training.moments import NumberedMoments, SavedMoments, SharedMoments, Trained
from turnwise.training.optimizer import LossScale, LRSchedule
from turnwise.training.ranks import Ranks
from turnwise.training.settings import StrategySettings
from turnwise.training.state import (
    read_shared_state,
    read_trainer_state,
    restore_trainer_state,
    trainer_state,
)
from turnwise.types import Batch, Metric, ModelOutputs

logger = logging.getLogger(__name__)

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Update:
    """An optimiser step that was made or skipped. `grad_norm` is the 2-norm of the whole gradient before
    clipping."""

    grad_norm: float
    is_skipped: bool


class BaseStrategy(ABC):
    """The part of `protocols.TrainStrategy` that doesn't depend on the engine. A strategy of an engine
    defines the methods that are abstract here; `docs/design/strategies.md` walks through a step of four
    engines.

    `rank` names the device and the other ranks."""

    max_file_bytes = MAX_FILE_BYTES
    """Maximum bytes of a file of shares."""

    def __init__(self, settings: StrategySettings, rank: RankContext | None = None) -> None:
        self._ranks = Ranks(rank)
        self._context = self._ranks.context
        self._stopwatch = self._context.stopwatch
        self.device = torch.device(self._context.device)
        self.settings = settings
        self._schedule: LRSchedule | None = None
        if settings.optimizer is not None:
            self._schedule = LRSchedule(settings.optimizer)
        self._loss_scale = LossScale(is_on=settings.scales_loss)
        self._num_updates = 0
        self._has_warned = False

    @classmethod
    @abstractmethod
    def for_role(
        cls,
        source: ModelSource,
        rank: RankContext,
        options: Mapping[str, Any],
        settings: StrategySettings,
    ) -> Self:
        """The strategy of a role on `rank`, which loads the model of `source` in its own way. `options` is
        the role's strategy_config. Raises ConfigError for options that the engine refuses; NotAvailableError
        if the engine isn't installed."""

    def forward(
        self,
        batches: Sequence[Batch],
        outputs: frozenset[Output],
        without_adapter: bool = False,
    ) -> list[dict[str, Any]]:
        """For each batch the outputs by name: float32 arrays [N], 0 outside the response mask.
        `without_adapter` uses the base model. Raises NotAvailableError if the model's head doesn't give an
        output, or there is no adapter to leave out."""
        if without_adapter:
            with self._base_model():
                results = self._forward(batches, outputs)
        else:
            results = self._forward(batches, outputs)
        self._count()
        return results

    def train_step(
        self,
        micro_batches: Sequence[Batch],
        loss: Loss,
        position: float = 0.0,
        part: StepPart = WHOLE_STEP,
    ) -> list[Metric]:
        """Makes one optimiser step, or a `part` of one, and returns the loss's metrics. With the last part
        the first rank adds `grad_norm` (before clipping; not for a skipped step), `lr` and `skipped_steps`.

        If a loss or a gradient isn't finite, the step is skipped: weights and optimiser stay as they are.
        Raises NotAvailableError if the strategy has no optimiser."""
        if self._schedule is None:
            names = [name for name, spec in STRATEGIES.items() if spec.kind == "train" and spec.is_available]
            raise NotAvailableError(
                f"a frozen model can't train; use a strategy_name that trains: {', '.join(names)}"
            )
        if part.number == 0:
            self._discard_gradients()
        metrics = self._add_gradients(micro_batches, loss, position, part)
        self._count()
        if part.divisor is None:
            return metrics
        self._finish_gradients()
        started = self._stopwatch.now()
        learning_rate = self._schedule.rate(position)
        update = self._make_update(learning_rate, part.divisor)
        self._note_update(update)
        self._stopwatch.add("trainer", "optimizer", started)
        return [*metrics, *self._update_metrics(update, learning_rate)]

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """`(Hugging Face name, tensor)` of every parameter, with adapters merged in. Tied parameters come
        once."""

    def save(self, folder: Path, form: SavedForm = "training") -> None:
        """Writes what `form` says: the training state, from which a run continues, or a plain Hugging Face
        folder (of adapters, a peft folder), or both. Raises OSError if the files can't be written."""
        if form == "model":
            self._write_model(folder)
            return
        state = trainer_state(self._loss_scale, self.device)
        self._write_training(folder, state, has_model=form == "training and model")

    def load(self, folder: Path) -> None:
        """Continues from what `save` wrote, bit for bit, by whichever strategy. The live tensors stay where
        they are, since an engine may share them. Raises ModelError if the folder holds no training state, or
        none of an optimiser and this strategy trains; if tensors have other names or shapes; if a share is
        missing or another checkpoint's; or if adapters belong to another base model."""
        shares = open_shares(folder)
        saved = read_trainer_state(folder) if shares is None else read_shared_state(folder)
        if shares is not None and shares.weights:
            self._set_weights(shares)
        else:
            self._read_weights(folder)
        if self.settings.is_trained:
            if saved["optimizer"] is None:
                raise ModelError(f"{folder} was saved without an optimiser and can't continue training")
            trained = self._trained()
            if shares is None:
                self._set_moments(NumberedMoments(saved["optimizer"]["state"], trained))
            else:
                self._set_moments(SharedMoments(shares, saved["optimizer"]["steps"], trained))
        restore_trainer_state(saved, self._loss_scale, self.device)

    def node_without(self, file: Path, text: str, wait_s: float = 10.0) -> str:
        """The name of this rank's node if it doesn't have a file that the run has written, which contains
        `text`; empty if it has. A folder on the network may take moments to show a new file."""
        end = time.monotonic() + wait_s
        while True:
            with suppress(OSError, UnicodeDecodeError):
                if file.read_text(encoding="utf-8") == text:
                    return ""
            if time.monotonic() >= end:
                return self._context.node or platform.node()
            time.sleep(_POLL_S)

    def offload(self, kinds: Iterable[MemoryKind]) -> None:
        """Moves these kinds of memory (`weights`, `optimizer`) to the host; does nothing on a CPU."""
        if self.device.type != "cpu":
            self._offload(frozenset(kinds))

    def onload(self, kinds: Iterable[MemoryKind]) -> None:
        """Moves these kinds of memory back to the device; does nothing on a CPU."""
        if self.device.type != "cpu":
            self._onload(frozenset(kinds))

    def info(self) -> StrategyInfo:
        return replace(self._describe(), optimizer=self._describe_optimizer(), num_updates=self._num_updates)

    # A forward pass

    @abstractmethod
    def _compute(self, batch: Batch, outputs: frozenset[Output]) -> ModelOutputs:
        """The outputs of one micro-batch of tensors."""

    def _forward(self, batches: Sequence[Batch], outputs: frozenset[Output]) -> list[dict[str, Any]]:
        """Computes one batch after the other. An engine whose schedule takes all of them at once has its
        own."""
        results: list[dict[str, Any]] = []
        for batch in batches:
            started = self._stopwatch.now()
            with torch.no_grad():
                tensors = self._compute(self._to_device(batch), outputs)
            computed = {name: tensor for name, tensor in tensors.named().items() if name in outputs}
            results.append({name: tensor.float().cpu().numpy() for name, tensor in computed.items()})
            self._note("forward", started, batch)
        return results

    @abstractmethod
    def _base_model(self) -> AbstractContextManager[None]:
        """In this context the model is the one without adapters. Raises NotAvailableError if there are
        none."""

    @abstractmethod
    def _take_counts(self) -> TokenCounts:
        """The tokens that passed through the model since the last call."""

    # The parts of an optimiser step, in their order

    @abstractmethod
    def _discard_gradients(self) -> None:
        """Forgets what the parts of an unfinished step left behind."""

    @abstractmethod
    def _add_gradients(
        self,
        micro_batches: Sequence[Batch],
        loss: Loss,
        position: float,
        part: StepPart,
    ) -> list[Metric]:
        """Adds the gradients of a part to those of the step's earlier parts; returns the loss's metrics. An
        engine that can't divide gradients afterwards may compute all parts with the last one, which tells
        `part.divisor`."""

    @abstractmethod
    def _finish_gradients(self) -> None:
        """Makes the gradients of all parts, and whether all losses were finite, the same on all ranks."""

    @abstractmethod
    def _make_update(self, learning_rate: float, divisor: float) -> Update:
        """Divides and clips the gradients and changes the weights, or skips the step if a loss or gradient
        isn't finite. Calls `_begin_update` just before weights change."""

    def _begin_update(self) -> None:
        """Counts an optimiser step before weights change: a second Ctrl-C may come in the middle of the
        change."""
        self._num_updates += 1

    # Saving, loading, memory and description

    @abstractmethod
    def _write_training(self, folder: Path, state: Mapping[str, Any], has_model: bool) -> None:
        """Writes weights, moments and the `trainer_state` into `folder`, which may not exist yet. `has_model`
        asks for a plain folder too."""

    @abstractmethod
    def _write_model(self, folder: Path) -> None:
        """Writes the weights as a plain Hugging Face folder, or adapters as a peft folder."""

    @abstractmethod
    def _read_weights(self, folder: Path) -> None:
        """Sets the live weights to those of a plain folder, or of a peft folder."""

    @abstractmethod
    def _set_weights(self, shares: Shares) -> None:
        """Sets the live weights to those of shares."""

    @abstractmethod
    def _trained(self) -> Trained:
        """The trained parameters, in the order of the Hugging Face model."""

    @abstractmethod
    def _set_moments(self, saved: SavedMoments) -> None:
        """Sets AdamW's moments. Rates, betas and weight decay stay this run's."""

    @abstractmethod
    def _offload(self, kinds: frozenset[MemoryKind]) -> None: ...

    @abstractmethod
    def _onload(self, kinds: frozenset[MemoryKind]) -> None: ...

    @abstractmethod
    def _describe(self) -> StrategyInfo:
        """The model and what is trained of it; the base adds the optimiser."""

    def _sharding(self) -> str:
        """How ranks share the optimiser's work, to be added to its description; empty if each does all of
        it."""
        return ""

    # What every engine does alike

    def _describe_optimizer(self) -> str:
        optimizer = self.settings.optimizer
        if optimizer is None:
            return ""
        max_norm = self.settings.max_grad_norm
        clipping = "" if max_norm is None else f", gradients clipped to norm {max_norm:g}"
        return optimizer.describe() + clipping + self._sharding()

    def _note_update(self, update: Update) -> None:
        """Adapts the loss scale, and warns of the first step that is skipped for another reason than the
        scale."""
        if update.is_skipped and not self._has_warned and self._loss_scale.is_lowest:
            self._has_warned = True
            logger.warning(
                "an optimiser step was skipped: its loss or gradient isn't finite (gradient norm %s). "
                "Later ones are only counted, in skipped_steps",
                update.grad_norm,
            )
        self._loss_scale.update(update.is_skipped)

    def _update_metrics(self, update: Update, learning_rate: float) -> list[Metric]:
        """The metrics of an optimiser step on the first rank, none on others."""
        if not self._context.answers:
            return []
        metrics = [
            Metric("lr", learning_rate, "last"),
            Metric("skipped_steps", float(update.is_skipped), "sum"),
        ]
        if not update.is_skipped:
            metrics.insert(0, Metric("grad_norm", update.grad_norm))
        return metrics

    def _count(self) -> None:
        """Reports to the stopwatch how many tokens passed through the model since the last report."""
        self._stopwatch.did_tokens(self._take_counts())

    def _note(self, name: str, started: float, batch: Batch) -> None:
        self._stopwatch.add(
            "trainer",
            name,
            started,
            samples=len(batch.lengths),
            tokens=batch.num_tokens,
        )
        self._stopwatch.did_batch(batch.num_tokens)

    def _to_device(self, batch: Batch) -> Batch:
        return batch.map(lambda array: torch.as_tensor(array, device=self.device))
