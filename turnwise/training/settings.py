"""How a strategy runs its model and changes it, for every engine alike."""

from dataclasses import dataclass

import torch

from turnwise.training.optimizer import OptimizerSettings


@dataclass(frozen=True, slots=True)
class StrategySettings:
    """Weights stay fp32. Without `optimizer` they are frozen, as those of a reference are."""

    optimizer: OptimizerSettings | None = None
    temperature: float = 1.0
    """Divides the logits of a policy."""
    max_grad_norm: float | None = 1.0
    """To this 2-norm gradients are clipped; None = never."""
    dtype: torch.dtype = torch.float32
    """Autocast's dtype in matrix products; fp32 turns autocast off, and fp16 also scales the loss, so that
    small gradients don't underflow."""
    is_gradient_checkpointing: bool = False
    """Whether layers keep only their inputs, and a backward pass computes the rest again."""

    @property
    def is_trained(self) -> bool:
        return self.optimizer is not None

    @property
    def scales_loss(self) -> bool:
        return self.is_trained and self.dtype == torch.float16


FROZEN = StrategySettings()
"""The settings of a frozen model in fp32."""
