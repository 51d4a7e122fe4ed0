"""Strategies of Megatron on a CPU, which keep what tests compare. Import this only where Megatron is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from megatron_cpu import on_a_cpu
from transformers import PreTrainedModel

from turnwise.runtime.rank import RankContext
from turnwise.training.settings import StrategySettings


def recorded(
    model: PreTrainedModel,
    settings: StrategySettings,
    options: Mapping[str, Any],
    rank: RankContext,
    averages: bool = False,
) -> Any:
    """A `MegatronStrategy` with the methods of `rank_workers.Recorded`, which begins as a run's does. With
    `averages` Megatron takes the means that it takes unless it is told otherwise."""
    on_a_cpu()
    from turnwise.training.megatron import startup
    from turnwise.training.megatron.comparison import reference_of
    from turnwise.training.megatron.strategy import MegatronStrategy

    made = startup.transformer_config

    def averaging(*arguments: Any) -> Any:
        return replace(made(*arguments), calculate_per_token_loss=False)

    class RecordedParts(MegatronStrategy):
        """Keeps the gradient of the last optimiser step, of whole tensors. All ranks must be asked
        together."""

        def __init__(self) -> None:
            super().__init__(model, settings, options=options, rank=rank)
            step = self._adam.step

            def keep_and_step(learning_rate: float) -> None:
                gradients = self._held.whole(self._adam.whole_gradient, self._is_trained_place)
                self.gradient = {name: tensor.numpy().copy() for name, tensor in gradients}
                step(learning_rate)

            self._adam.step = keep_and_step

        def last_gradient(self) -> dict[str, np.ndarray]:
            return self.gradient

        def loss_scale(self) -> float:
            return self._loss_scale.factor

        def parameters(self) -> dict[str, np.ndarray]:
            return {name: tensor.numpy().copy() for name, tensor in self.weights()}

        @property
        def modes(self) -> list[bool]:
            return [module.training for part in self._parts for module in part.modules()]

    reference = reference_of(model, None) if rank.answers else None
    if averages:
        startup.transformer_config = averaging
    kernels: AbstractContextManager[None] = nullcontext()
    if rank.layout.cp > 1:
        from megatron_context import on_kernels

        kernels = on_kernels()
    try:
        with kernels:
            parts = RecordedParts()
    finally:
        startup.transformer_config = made
    parts.require_same_outputs(reference)
    return parts
