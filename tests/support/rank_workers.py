"""Workers of several ranks, in a module that their processes can import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from strategy_contract import OUTPUTS, WeightedLoss
from toy_model import toy_model, toy_value_model

from turnwise.models.lora import Adapters, LoRASettings
from turnwise.models.value_head import value_head
from turnwise.protocols import Output
from turnwise.runtime.rank import RankContext
from turnwise.training.fsdp2_strategy import Fsdp2Strategy
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.shards import whole_tensor
from turnwise.training.torch_strategy import TorchStrategy

RATE = 1e-3


def _memory(name: str) -> int:
    """A number of bytes that Linux tells of this process."""
    text = Path("/proc/self/status").read_text().split(f"{name}:")[1]
    return 1024 * int(text.split()[0])


class Recorded(TorchStrategy):
    """Keeps the gradient of the last optimiser step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._adam.register_step_pre_hook(lambda *_: self._keep())

    def _keep(self) -> None:
        named = self.model.named_parameters()
        self.gradient = {name: p.grad.clone().numpy() for name, p in named if p.grad is not None}

    def last_gradient(self) -> dict[str, np.ndarray]:
        return self.gradient

    def loss_scale(self) -> float:
        return self._loss_scale.factor

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().numpy().copy() for name, tensor in self.model.named_parameters()}


class RecordedShards(Fsdp2Strategy):
    """As `Recorded`, of whole tensors. All ranks must be asked together."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._adam.register_step_pre_hook(lambda *_: self._keep())

    def _keep(self) -> None:
        named = self.model.named_parameters()
        self.gradient = {
            name: whole_tensor(p.grad).clone().numpy() for name, p in named if p.grad is not None
        }

    def memory_of_saving(self, folder: Path, max_file_bytes: int) -> tuple[int, int]:
        """Bytes of resident memory before saving in every form, and the most while saving."""
        self.max_file_bytes = max_file_bytes
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        self.save(folder, "training and model")
        return before, _memory("VmHWM")

    def last_gradient(self) -> dict[str, np.ndarray]:
        return self.gradient

    def loss_scale(self) -> float:
        return self._loss_scale.factor

    def parameters(self) -> dict[str, np.ndarray]:
        named = self.model.named_parameters()
        return {name: whole_tensor(tensor.detach()).clone().numpy() for name, tensor in named}


@dataclass(frozen=True)
class Kind:
    """What is trained."""

    model: str = "policy"
    rank: int | None = None
    dropout: float = 0.0
    outputs: frozenset[Output] = OUTPUTS
    eps: float = 1e-8
    stage: int | None = None
    """The ZeRO stage of DeepSpeed; None = plain torch."""
    fsdp2: Mapping[str, Any] | None = None
    """The options of FSDP2; None = another engine."""
    megatron: Mapping[str, Any] | None = None
    """The options of Megatron on a CPU; None = another engine."""
    averages: bool = False
    """Whether Megatron takes means where it must sum: a mistake that tests must notice."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What differs in the model's config."""
    is_gradient_checkpointing: bool = False
    max_grad_norm: float = 1e9
    scheduler: str = "constant"
    differs: bool = False
    """Whether each rank begins with weights of its own."""
    dtype: torch.dtype = torch.float32

    def make(self, rank: RankContext) -> TorchStrategy:
        make = toy_value_model if self.model == "value" else toy_model
        model = make(rank.rank if self.differs else 0, **self.config)
        adapters = None
        if self.rank is not None:
            lora = LoRASettings(rank=self.rank, alpha=8, dropout=self.dropout, seed=1)
            adapters = Adapters(model, lora, head=value_head(model))
        settings = StrategySettings(
            OptimizerSettings(RATE, eps=self.eps, scheduler=self.scheduler, total_steps=50),
            max_grad_norm=self.max_grad_norm,
            dtype=self.dtype,
            is_gradient_checkpointing=self.is_gradient_checkpointing,
        )
        if self.fsdp2 is not None:
            return RecordedShards(model, settings, options=self.fsdp2, adapters=adapters, rank=rank)
        if self.megatron is not None:
            from megatron_strategies import recorded

            return recorded(model, settings, self.megatron, rank, self.averages)
        if self.stage is None:
            return Recorded(model, settings, adapters=adapters, rank=rank)
        from turnwise.training.deepspeed_strategy import DeepSpeedStrategy

        return DeepSpeedStrategy(
            model,
            settings,
            options={"zero_optimization": {"stage": self.stage}},
            adapters=adapters,
            rank=rank,
        )


class RaisesOnce(WeightedLoss):
    """Raises in the process of one rank."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self.process = process

    def __call__(self, outputs, batch):
        if os.getpid() == self.process:
            raise ArithmeticError("the loss of one rank")
        return super().__call__(outputs, batch)


class InfiniteOnce(WeightedLoss):
    """Infinite in the process of one rank, where its gradient is finite."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self.process = process

    def __call__(self, outputs, batch):
        loss, metrics = super().__call__(outputs, batch)
        return loss + (float("inf") if os.getpid() == self.process else 0.0), metrics


def mean_distance(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    """mean |first − second| / mean |first|."""
    assert first.keys() == second.keys()
    pairs = [(first[name].astype(np.float64), second[name]) for name in first]
    difference = sum(float(abs(one - other).sum()) for one, other in pairs)
    return difference / sum(float(abs(one).sum()) for one, _ in pairs)


def distance(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    """‖first − second‖ / ‖first‖."""
    assert first.keys() == second.keys()
    difference = sum(float(((first[name] - second[name]).astype(np.float64) ** 2).sum()) for name in first)
    return (difference / sum(float((first[name].astype(np.float64) ** 2).sum()) for name in first)) ** 0.5
