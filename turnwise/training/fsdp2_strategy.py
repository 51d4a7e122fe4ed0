"""Training and forward passes of a model whose weights are shared out among the ranks by torch's own
`fully_shard` (FSDP2)."""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from turnwise.errors import counted
from turnwise.models.lora import Adapters
from turnwise.models.shares import MOMENTS, Shares, moment_key
from turnwise.protocols import Loss, MemoryKind, Output, StepPart
from turnwise.runtime.info import StrategyInfo
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import TokenCounts
from turnwise.spec.fsdp2_options import Fsdp2Options
from turnwise.training.base import BaseStrategy, Update
from turnwise.training.model_source import ModelSource
from turnwise.training.moments import SavedMoments, Trained, trained_of
from turnwise.training.optimizer import build_optimizer, moment_numbers, set_learning_rate
from turnwise.training.settings import FROZEN, StrategySettings
from turnwise.training.shards import ShardedModel, fill_shares, share, whole_tensor
from turnwise.training.shared_checkpoint import add_settings, add_weights, write_model, write_training
from turnwise.training.state import load_moments, require_same_tensors, saved_tensors
from turnwise.training.transformers_model import TransformersModel
from turnwise.transfer.live import manifest_of
from turnwise.transfer.manifest import WeightManifest
from turnwise.types import Batch, Metric, ModelOutputs

logger = logging.getLogger(__name__)


class Fsdp2Strategy(BaseStrategy):
    """Trains a policy or a value model, or runs a frozen one, of which each rank keeps a share of weights,
    gradients and moments (see `ShardedModel`).

    All ranks compute the same number of micro-batches, even those of weight 0, since weights are gathered
    for each. Gradients are summed over the ranks after each micro-batch, or after the step's last one
    (`sync_gradients`), and divided once. Each rank writes its share of a checkpoint, and a run can continue
    with another number of ranks or another strategy. Raises ConfigError for options that torch doesn't know
    or refuses.

    `fill`, if given, writes this rank's share of the weights, which the `model` then doesn't have."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: StrategySettings = FROZEN,
        *,
        options: Mapping[str, Any],
        adapters: Adapters | None = None,
        rank: RankContext | None = None,
        fill: Callable[[ShardedModel], None] | None = None,
    ) -> None:
        super().__init__(settings, rank)
        dtype_name = str(settings.dtype).removeprefix("torch.")
        self._options = Fsdp2Options.of(options, self._context.world_size, dtype_name)
        if not settings.is_trained:
            model.requires_grad_(False)
        if fill is None:
            model.to(self.device)
            self._ranks.copy_from_first(model.state_dict().values())
        self._sharded = ShardedModel(model, self._options, self.device, self._peers)
        if fill is not None:
            fill(self._sharded)
        with torch.no_grad():
            self._model = TransformersModel(
                model,
                self.device,
                settings,
                adapters,
                uses_kernels=False,
                within=self._sharded,
            )
        self._sharded.release()
        self.model = self._model.module
        self._is_finite = True  # whether all losses of the current optimiser step so far are finite
        self._unsynced: Batch | None = None
        """A micro-batch whose gradients aren't summed over the ranks yet."""
        self._unsynced_loss: Loss | None = None
        self._optimizer: AdamW | None = None
        if settings.optimizer is not None:
            self._optimizer = build_optimizer(self.model, settings.optimizer)

    @classmethod
    def for_role(
        cls,
        source: ModelSource,
        rank: RankContext,
        options: Mapping[str, Any],
        settings: StrategySettings,
    ) -> Self:
        make = partial(cls, settings=settings, options=options, rank=rank)
        slices = source.load_slices()
        if slices is None:
            logger.info("%s can't be read by slices, so each rank loads all of it", source.path)
            model = source.load(rank)
            adapters = source.prepare(model, rank) if settings.is_trained else None
            return make(model, adapters=adapters)
        adapters = None
        if settings.is_trained:
            with slices.standing_in():
                fingerprint = "" if source.adapters is None else slices.fingerprint()
                adapters = source.prepare(slices.model, rank, fingerprint)
        return make(slices.model, adapters=adapters, fill=partial(fill_shares, slices))

    @property
    def _peers(self) -> tuple[int, ...]:
        return self._context.peers

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model.weights(self._gathered):
            yield name, whole_tensor(tensor)

    def weight_manifest(self) -> WeightManifest:
        """The names, shapes and dtypes of `weights`, without gathering them."""
        return manifest_of(self._model.shapes())

    # A forward pass

    def _compute(self, batch: Batch, outputs: frozenset[Output]) -> ModelOutputs:
        named = self._sharded(lambda: self._model.compute(batch, outputs).named())
        return ModelOutputs(**named)

    def _forward(self, batches: Sequence[Batch], outputs: frozenset[Output]) -> list[dict[str, Any]]:
        results = super()._forward(batches, outputs)
        self._sharded.release()
        return results

    def _base_model(self) -> AbstractContextManager[None]:
        return self._model.without_adapters()

    def _take_counts(self) -> TokenCounts:
        return self._model.take_counts()

    # The parts of an optimiser step

    def _discard_gradients(self) -> None:
        self._sync_rest()
        self._adam.zero_grad(set_to_none=True)
        self._is_finite = True

    def _add_gradients(
        self,
        micro_batches: Sequence[Batch],
        loss: Loss,
        position: float,
        part: StepPart,
    ) -> list[Metric]:
        metrics: list[Metric] = []
        is_last_part = part.divisor is not None
        with self._model.dropping(position, part.number, self._context.rank):
            for number, batch in enumerate(micro_batches, start=1):
                is_last = is_last_part and number == len(micro_batches)
                self._sync(is_last or self._options.sync_gradients == "each", batch, loss)
                metrics += self._backward(batch, loss)
        return metrics

    def _backward(self, batch: Batch, loss: Loss) -> list[Metric]:
        started = self._stopwatch.now()
        tensors = self._to_device(batch)
        metrics: list[Metric] = []
        try:
            with self._model.recomputing():
                outputs = self._compute(tensors, loss.outputs)
                if batch.weights.any():
                    value, metrics = loss(outputs, tensors)
                else:
                    value = _nothing(outputs)
                (value * self._loss_scale.factor).backward()
        finally:
            self._sharded.release()
        self._is_finite = self._is_finite and bool(torch.isfinite(value.detach()))
        self._note("forward and backward", started, batch)
        return metrics

    def _sync(self, is_on: bool, batch: Batch, loss: Loss) -> None:
        """Says whether the next backward pass sums gradients over the ranks."""
        self._sharded.sync_gradients(is_on)
        self._unsynced = None if is_on else batch
        self._unsynced_loss = None if is_on else loss

    def _sync_rest(self) -> None:
        """Sums what no backward pass has summed yet. torch does that only in a backward pass, so there is one
        more, which adds nothing."""
        batch, loss = self._unsynced, self._unsynced_loss
        if batch is None or loss is None:
            return
        self._sync(True, batch, loss)
        outputs = self._compute(self._to_device(batch), loss.outputs)
        _nothing(outputs).backward()
        self._sharded.release()

    def _finish_gradients(self) -> None:
        started = self._stopwatch.now()
        self._sync_rest()
        self._is_finite = self._ranks.all(self._is_finite, self.device)
        self._stopwatch.add("trainer", "sum over ranks", started)

    def _make_update(self, learning_rate: float, divisor: float) -> Update:
        """Every rank has the same norm and flag, so all ranks scale, skip and step in the same way."""
        divisor *= self._loss_scale.factor
        gradients = [
            share(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None
        ]
        if divisor != 1.0:
            for gradient in gradients:
                gradient /= divisor
        grad_norm = self._norm(gradients)
        if self.settings.max_grad_norm is not None:
            factor = min(self.settings.max_grad_norm / (grad_norm + 1e-6), 1.0)
            for gradient in gradients:
                gradient *= factor
        set_learning_rate(self._adam, learning_rate)
        is_skipped = not (self._is_finite and np.isfinite(grad_norm))
        self._begin_update()
        if not is_skipped:
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return Update(grad_norm, is_skipped)

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        """The 2-norm of the whole gradient, of which the ranks have these shares."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in gradients:
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            total += norm.to(self.device) ** 2
        self._sharded.sum_over_shards(total)
        return float(total.sqrt())

    @property
    def _adam(self) -> AdamW:
        assert self._optimizer is not None, "a frozen model has no optimiser"
        return self._optimizer

    # Saving, loading, memory and description

    def _gathered(
        self, parameters: Sequence[Tensor], is_changed: bool = False
    ) -> AbstractContextManager[None]:
        return self._sharded.whole(parameters, is_changed)

    def _write_training(self, folder: Path, state: Mapping[str, Any], has_model: bool) -> None:
        tensors = self._named_moments()
        if self._model.adapters is None:
            tensors = itertools.chain(saved_tensors(self.model), tensors)
        size = self._model.describe().saved_bytes
        blocks = self._sharded.blocks(tensors)
        write_training(
            folder,
            self._ranks,
            blocks,
            state,
            self._steps(),
            size,
            self.max_file_bytes,
        )
        if self._model.adapters is not None:
            self._write_model(folder)
            return
        add_settings(folder, self._ranks, self.model)
        if has_model:
            add_weights(folder, self._ranks, self.max_file_bytes)

    def _write_model(self, folder: Path) -> None:
        if self._model.adapters is None:
            blocks = self._sharded.blocks(saved_tensors(self.model))
            write_model(folder, self._ranks, blocks, self.model, self.max_file_bytes)
            return
        with self._gathered(self._model.adapters.parameters):
            if self._context.answers:
                self._model.write(folder)

    def _read_weights(self, folder: Path) -> None:
        if self._model.adapters is None:
            self._model.read(folder, copy=self._sharded.set_whole)
        else:
            self._model.read(folder, partial(self._gathered, is_changed=True))

    @torch.no_grad()
    def _set_weights(self, shares: Shares) -> None:
        self._model.require_all_trained(shares.folder)
        tensors = dict(saved_tensors(self.model))
        require_same_tensors(shares, tensors)
        for name, tensor in tensors.items():
            start, stop = self._sharded.held_rows(tensor)
            share(tensor).copy_(shares.rows(name, tensor.shape, start, stop))

    def _trained(self) -> Trained:
        return trained_of(self.model.named_parameters())

    def _named_moments(self) -> Iterator[tuple[str, Tensor]]:
        if self._optimizer is None:
            return
        for name, parameter in self.model.named_parameters():
            saved = self._adam.state.get(parameter, {})
            for moment in MOMENTS if saved else ():
                yield moment_key(moment, name), saved[moment]

    def _steps(self) -> dict[str, float] | None:
        """How many steps AdamW has made of each parameter; None for a frozen model."""
        if self._optimizer is None:
            return None
        steps: dict[str, float] = {}
        for name, parameter in self.model.named_parameters():
            if parameter in self._adam.state:
                steps[name] = float(whole_tensor(self._adam.state[parameter]["step"]))
        return steps

    def _set_moments(self, saved: SavedMoments) -> None:
        numbers = moment_numbers(self._trained())
        state: dict[int, dict[str, Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            if name not in numbers:
                continue
            step = saved.step(name)
            if step is None:
                continue
            start, stop = self._sharded.rows_of(parameter)
            moments: dict[str, Tensor] = {"step": step}
            for moment in MOMENTS:
                moments[moment] = torch.zeros_like(parameter.detach())
                share(moments[moment]).copy_(saved.rows(name, moment, start, stop))
            state[numbers[name]] = moments
        load_moments(self._adam, state)

    def _offload(self, kinds: frozenset[MemoryKind]) -> None:
        self._move(kinds, torch.device("cpu"))

    def _onload(self, kinds: frozenset[MemoryKind]) -> None:
        self._move(kinds, self.device)

    def _move(self, kinds: frozenset[MemoryKind], target: torch.device) -> None:
        if self._options.offload_policy:
            return  # its shares are in host memory already
        if "weights" in kinds:
            self._sharded.to(target)
        if "optimizer" in kinds and self._optimizer is not None:
            for state in self._optimizer.state.values():
                state.update({name: tensor.to(target) for name, tensor in state.items()})
        torch.cuda.empty_cache()  # so that a server in another process can use the memory

    def _describe(self) -> StrategyInfo:
        return self._model.describe()

    def _sharding(self) -> str:
        num_ranks = counted(self._sharded.num_shards, "rank")
        sharding = f"; FSDP2 shards weights, gradients and moments over {num_ranks}"
        if self._sharded.num_copies > 1:
            return f"{sharding}, {self._sharded.num_copies} times"
        return sharding


def _nothing(outputs: ModelOutputs) -> Tensor:
    """0, with a gradient of 0 for every parameter."""
    total = sum(output.sum() for output in outputs.named().values())
    return 0.0 * torch.as_tensor(total)
