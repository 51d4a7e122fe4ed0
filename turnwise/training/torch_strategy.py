"""Training and forward passes of a model in plain PyTorch, with the whole model on the device of each
rank."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from turnwise.errors import ConfigError
from turnwise.models.lora import Adapters
from turnwise.models.shares import Shares
from turnwise.protocols import Loss, MemoryKind, Output, StepPart
from turnwise.runtime.disk import require_space
from turnwise.runtime.info import StrategyInfo
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import TokenCounts
from turnwise.training.base import BaseStrategy, Update
from turnwise.training.model_source import ModelSource
from turnwise.training.moments import SavedMoments, Trained, trained_of, whole_moments
from turnwise.training.optimizer import build_optimizer, clip_gradients, set_learning_rate
from turnwise.training.settings import FROZEN, StrategySettings
from turnwise.training.state import copy_shares, load_moments, write_trainer_state
from turnwise.training.transformers_model import TransformersModel
from turnwise.types import Batch, Metric, ModelOutputs


class TorchStrategy(BaseStrategy):
    """Trains a policy or a value model, or runs a frozen one (see `BaseStrategy` and `TransformersModel`).

    Parameters are only changed in place, so an engine may read them, and they may be views of a larger
    tensor. Each rank has a share of the micro-batches. Gradients are summed over the ranks before an
    optimiser step, so all make the same step."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: StrategySettings = FROZEN,
        *,
        adapters: Adapters | None = None,
        rank: RankContext | None = None,
    ) -> None:
        super().__init__(settings, rank)
        self._model = TransformersModel(model.to(self.device), self.device, settings, adapters)
        self.model = self._model.module
        self._is_finite = True  # whether all losses of the current optimiser step so far are finite
        self._optimizer: AdamW | None = None
        if settings.optimizer is not None:
            self._ranks.copy_from_first(self.model.state_dict().values())
            self._optimizer = build_optimizer(self.model, settings.optimizer)

    @classmethod
    def for_role(
        cls,
        source: ModelSource,
        rank: RankContext,
        options: Mapping[str, Any],
        settings: StrategySettings,
    ) -> Self:
        if options:
            raise ConfigError(
                f"strategy_args.strategy_config: plain PyTorch has no option {', '.join(options)}"
            )
        model = source.load(rank)
        adapters = source.prepare(model, rank)
        return cls(model, settings, adapters=adapters, rank=rank)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._model.weights()

    def _compute(self, batch: Batch, outputs: frozenset[Output]) -> ModelOutputs:
        return self._model.compute(batch, outputs)

    def _base_model(self) -> AbstractContextManager[None]:
        return self._model.without_adapters()

    def _take_counts(self) -> TokenCounts:
        return self._model.take_counts()

    def _discard_gradients(self) -> None:
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
        with self._model.dropping(position, part.number, self._context.rank):
            for batch in micro_batches:
                if batch.weights.any():
                    metrics += self._backward(batch, loss)
        return metrics

    def _backward(self, batch: Batch, loss: Loss) -> list[Metric]:
        started = self._stopwatch.now()
        tensors = self._to_device(batch)
        with self._model.recomputing():
            outputs = self._compute(tensors, loss.outputs)
            value, metrics = loss(outputs, tensors)
            (value * self._loss_scale.factor).backward()
        self._is_finite = self._is_finite and bool(torch.isfinite(value.detach()))
        self._note("forward and backward", started, batch)
        return metrics

    def _finish_gradients(self) -> None:
        if self._ranks.is_one:
            return
        started = self._stopwatch.now()
        self._ranks.sum_gradients(self._model.trained_parameters)
        self._is_finite = self._ranks.all(self._is_finite, self.device)
        self._stopwatch.add("trainer", "sum over ranks", started)

    def _make_update(self, learning_rate: float, divisor: float) -> Update:
        """Every rank has the same sum of gradients, so all ranks scale, skip and step in the same way."""
        divisor *= self._loss_scale.factor
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if divisor != 1.0:
            for gradient in gradients:
                gradient /= divisor
        changing = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        grad_norm = clip_gradients(changing, self.settings.max_grad_norm).item()
        set_learning_rate(self._adam, learning_rate)
        is_skipped = not (self._is_finite and np.isfinite(grad_norm))
        self._begin_update()
        if not is_skipped:
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return Update(grad_norm, is_skipped)

    @property
    def _adam(self) -> AdamW:
        assert self._optimizer is not None, "a frozen model has no optimiser"
        return self._optimizer

    def _write_training(self, folder: Path, state: Mapping[str, Any], has_model: bool) -> None:
        """The weights are a plain folder in any case."""
        if self._context.answers:
            require_space(folder, self._model.describe().saved_bytes)
            self._model.write(folder)
            moments = self._adam.state_dict() if self.settings.is_trained else None
            write_trainer_state(folder, state, moments)

    def _write_model(self, folder: Path) -> None:
        if self._context.answers:
            self._model.write(folder)

    def _read_weights(self, folder: Path) -> None:
        self._model.read(folder)

    def _set_weights(self, shares: Shares) -> None:
        self._model.require_all_trained(shares.folder)
        copy_shares(shares, self.model)

    def _trained(self) -> Trained:
        return trained_of(self.model.named_parameters())

    def _set_moments(self, saved: SavedMoments) -> None:
        load_moments(self._adam, whole_moments(saved, self._trained()))

    def _offload(self, kinds: frozenset[MemoryKind]) -> None:
        self._move(kinds, torch.device("cpu"))

    def _onload(self, kinds: frozenset[MemoryKind]) -> None:
        """Weights that were views of a larger tensor aren't any more."""
        self._move(kinds, self.device)

    def _move(self, kinds: frozenset[MemoryKind], target: torch.device) -> None:
        if "weights" in kinds:
            self.model.to(target)
        if "optimizer" in kinds and self._optimizer is not None:
            for state in self._optimizer.state.values():
                tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
                state.update({name: tensor.to(target) for name, tensor in tensors.items()})
        torch.cuda.empty_cache()  # so that a server in another process can use the memory

    def _describe(self) -> StrategyInfo:
        return self._model.describe()
