"""What a decoder layer does between its matrix products, as the fast path calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from turnwise.inference.embedded.cache import KVCache
from turnwise.inference.embedded.runner import Step
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


class LayerOps(Protocol):
    """The operations over the tokens of one forward pass, packed, `N` of them."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / √(mean x² + eps) · weight over the last dimension (Zhang & Sennrich 2019)."""
        ...

    def place_heads(self, layer: int, qkv: Tensor, norms: Tensor | None) -> Tensor:
        """Queries [N, heads, head_dim] out of `qkv` [N, (heads + 2 kv_heads) · head_dim]; keys and values go to the cache.

        Queries and keys are normed by `norms` [heads + kv_heads, head_dim] where given, and rotated (Su et al. 2021).
        """
        ...

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Attention output [N, heads · head_dim]: each token sees its slot's cache up to its own position."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of [N, 2 · size], their halves; [N, size]. Its argument may be overwritten."""
        ...


class MakeOps(Protocol):
    """Operations of one forward pass over `step`, whose slots the cache has room for; `rotary` [length, 2, head_dim] holds
    cosines, and sines with the sign of their half of the head."""

    def __call__(self, step: Step, shape: HeadShape, cache: KVCache, rotary: Tensor) -> LayerOps: ...
