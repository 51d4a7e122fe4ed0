"""The shape and the weights of a decoder layer, as the fast path has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from turnwise.models.fused import FusedLinear


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    """The ε of all norms."""

    @property
    def num_rotated(self) -> int:
        return self.num_heads + self.num_kv_heads


class LayerWeights(NamedTuple):
    """One decoder layer's parameters, as tensors that share the model's memory unless it says otherwise."""

    input_norm: Tensor
    qkv: FusedLinear
    head_norms: Tensor | None
    """[heads + kv_heads, head_dim]: query and key norms (Qwen3), copied."""
    output: FusedLinear
    post_norm: Tensor
    gate_up: FusedLinear
    down: FusedLinear
