"""The fast path: an own forward pass of the Llama, Qwen2, Qwen3 and Mistral shape over fused projections.

It reads the parameters of the model it was given, without a copy: an in-place weight update is an update here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.inference.embedded.attention import attend, plan_attention
from turnwise.inference.embedded.cache import KVCache
from turnwise.inference.embedded.runner import Step
from turnwise.models.fused import FusedLinear, fuse_projections, fused_gate_up, fused_qkv


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


class FusedRunner:
    """Forward passes of a model that `supports_fast_path`, keeping keys and values in a `KVCache`. Fuses its projections.

    Raises:
        ConfigError: `kv_cache_bytes` has no room for one sequence of `max_length` tokens.
        ModelError: the model hasn't the shape.
    """

    def __init__(self, model: PreTrainedModel, *, max_length: int, kv_cache_bytes: int) -> None:
        self._model = model
        self._max_length = max_length
        attention = model.model.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._num_heads: int = model.config.num_attention_heads
        self._num_kv_heads: int = model.config.num_key_value_heads
        self._scale: float = attention.scaling
        self._eps: float = model.config.rms_norm_eps
        self._cache = KVCache(
            num_layers=len(model.model.layers),
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            max_length=max_length,
            num_bytes=kv_cache_bytes,
            dtype=model.dtype,
            device=model.device,
        )
        self.max_slots = self._cache.max_slots
        self.can_copy = True
        self.refresh()

    def refresh(self) -> None:
        model, body = self._model, self._model.model
        fuse_projections(model)
        self._layers = [self._layer_weights(layer) for layer in body.layers]
        self._embedding = body.embed_tokens.weight.detach()
        self._final_norm = body.norm.weight.detach()
        self._unembedding = model.lm_head.weight.detach()
        positions = torch.arange(self._max_length, device=model.device)[None]
        cos, sin = body.rotary_emb(self._embedding, positions)
        # With the sign in the table, rotating by half a turn is a swap of halves.
        half = self._head_dim // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        self._rotary = torch.stack((cos[0], sin[0]), 1)[:, :, None]

    def _layer_weights(self, layer: Any) -> LayerWeights:
        attention, head_norms = layer.self_attn, None
        if type(self._model).__name__ == "Qwen3ForCausalLM":
            norms = [attention.q_norm.weight.detach()] * self._num_heads + [
                attention.k_norm.weight.detach()
            ] * self._num_kv_heads
            head_norms = torch.stack(norms)
        return LayerWeights(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=fused_qkv(layer),
            head_norms=head_norms,
            output=_detached(attention.o_proj),
            post_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=fused_gate_up(layer),
            down=_detached(layer.mlp.down_proj),
        )

    def reserve(self, num_slots: int, length: int) -> None:
        self._cache.reserve(num_slots, length)

    def usable_prefix(self, slot: int, num_cached: int, num_common: int) -> int:
        return num_common

    def copy_prefix(self, source: int, target: int, start: int, stop: int) -> None:
        self._cache.copy(source, target, start, stop)

    def free(self) -> None:
        self._cache.free()

    def forward(self, step: Step) -> Tensor:
        device = self._embedding.device
        per_token = np.stack((step.token_ids, step.slots[step.rows], step.positions))
        token_ids, slots, positions = torch.from_numpy(per_token).to(device)
        groups = plan_attention(step, device, self._embedding.dtype)
        cos, sin = self._rotary.index_select(0, positions).unbind(1)
        num_rotated = self._num_heads + self._num_kv_heads
        cache, eps = self._cache, self._eps

        hidden = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = _rms_norm(hidden, layer.input_norm, eps)
            heads = F.linear(normed, *layer.qkv).view(len(token_ids), -1, self._head_dim)
            rotated = heads[:, :num_rotated]
            if layer.head_norms is not None:
                rotated = _rms_norm(rotated, layer.head_norms, eps)
            rotated = _rotate(rotated, cos, sin)
            cache.write(index, slots, positions, rotated[:, self._num_heads :], heads[:, num_rotated:])
            queries = rotated[:, : self._num_heads]
            mixed = attend(queries, cache.keys[index], cache.values[index], groups, self._scale)
            _add_linear(hidden, mixed, layer.output)
            normed = _rms_norm(hidden, layer.post_norm, eps)
            gate, up = F.linear(normed, *layer.gate_up).chunk(2, -1)
            _add_linear(hidden, F.silu(gate).mul_(up), layer.down)

        if len(step.last_tokens) < len(token_ids):
            hidden = hidden[torch.from_numpy(step.last_tokens).to(device)]
        return F.linear(_rms_norm(hidden, self._final_norm, eps), self._unembedding).float()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + eps) · weight over the last dimension (Zhang & Sennrich 2019)."""
    if x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, x.shape[-1:], eps=eps) * weight
    # torch has no kernel of its own for a CPU; it makes more passes over x than these three.
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * size.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()).mul_(weight)


def _add_linear(hidden: Tensor, x: Tensor, linear: FusedLinear) -> None:
    """hidden += linear(x), in place."""
    if linear.bias is not None:
        hidden += linear.bias
    hidden.addmm_(x, linear.weight.t())


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of heads [N, heads, head_dim] by tables [N, 1, head_dim]."""
    first, second = heads.chunk(2, -1)
    return (heads * cos).addcmul_(torch.cat((second, first), -1), sin)


def _detached(linear: nn.Linear) -> FusedLinear:
    return FusedLinear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
