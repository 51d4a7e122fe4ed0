"""A decoder layer of the fast path: its shape, its weights, and its work between matrix products in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnwise.inference.embedded.attention import attend, plan_attention
from turnwise.inference.embedded.cache import KVCache
from turnwise.inference.embedded.runner import PackedStep
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


class TorchOps:
    """The operations over the `N` packed tokens of one forward pass over `step`, whose slots the cache has room for.

    `rotary` [length, 2, head_dim] holds cosines, and sines with the sign of their half of the head. Rows of similar lengths go
    through one kernel call of `scaled_dot_product_attention` together.
    """

    def __init__(self, step: PackedStep, shape: HeadShape, cache: KVCache, rotary: Tensor) -> None:
        device, dtype = rotary.device, rotary.dtype
        self._shape = shape
        self._cache = cache
        self._slots = torch.from_numpy(step.slots[step.rows]).to(device)
        self._positions = torch.from_numpy(step.positions).to(device)
        self._cosines, self._sines = rotary.index_select(0, self._positions)[:, :, None].unbind(1)
        self._groups = plan_attention(step, device, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / √(mean x² + eps) · weight over the last dimension (Zhang & Sennrich 2019)."""
        if x.is_cuda or x.dtype != torch.float32:
            return F.rms_norm(x, x.shape[-1:], eps=self._shape.eps) * weight
        # torch has no kernel of its own for a CPU; it makes more passes over x than these three.
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * size.square_().mul_(1 / x.shape[-1]).add_(self._shape.eps).rsqrt_()).mul_(weight)

    def place_heads(self, layer: int, qkv: Tensor, norms: Tensor | None) -> Tensor:
        """Queries [N, heads, head_dim] out of `qkv` [N, (heads + 2 kv_heads) · head_dim]; keys and values go to the cache.

        Queries and keys are normed by `norms` [heads + kv_heads, head_dim] where given, and rotated (Su et al. 2021).
        """
        shape = self._shape
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        rotated = heads[:, : shape.num_rotated]
        if norms is not None:
            rotated = self.rms_norm(rotated, norms)
        first, second = rotated.chunk(2, -1)
        rotated = (rotated * self._cosines).addcmul_(torch.cat((second, first), -1), self._sines)
        keys, values = rotated[:, shape.num_heads :], heads[:, shape.num_rotated :]
        self._cache.write(layer, self._slots, self._positions, keys, values)
        return rotated[:, : shape.num_heads]

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Attention output [N, heads · head_dim]: each token sees its slot's cache up to its own position."""
        return attend(queries, self._cache.keys[layer], self._cache.values[layer], self._groups, self._shape.scale)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of [N, 2 · size], their halves; [N, size]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
