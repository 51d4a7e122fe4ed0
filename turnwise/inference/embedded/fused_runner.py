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
    """One decoder layer's parameters, as tensors that share the model's memory."""

    input_norm: Tensor
    qkv: FusedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
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
        self.refresh()

    def refresh(self) -> None:
        model, body = self._model, self._model.model
        fuse_projections(model)
        has_head_norms = type(model).__name__ == "Qwen3ForCausalLM"
        self._layers = [_layer_weights(layer, has_head_norms) for layer in body.layers]
        self._embedding = body.embed_tokens.weight.detach()
        self._final_norm = body.norm.weight.detach()
        self._unembedding = model.lm_head.weight.detach()
        positions = torch.arange(self._max_length, device=model.device)[None]
        cos, sin = body.rotary_emb(self._embedding, positions)
        # With the sign in the table, rotating by half a turn is a swap of halves.
        half = self._head_dim // 2
        self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)

    def reserve(self, num_slots: int, length: int) -> None:
        self._cache.reserve(num_slots, length)

    def usable_prefix(self, slot: int, num_cached: int, num_common: int) -> int:
        return num_common

    def free(self) -> None:
        self._cache.free()

    def forward(self, step: Step) -> Tensor:
        device = self._embedding.device
        per_token = np.stack((step.token_ids, step.slots[step.rows], step.positions))
        token_ids, slots, positions = torch.from_numpy(per_token).to(device)
        groups = plan_attention(step, device)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        num_rotated = self._num_heads + self._num_kv_heads
        cache, eps = self._cache, self._eps

        hidden = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.input_norm, eps)
            heads = F.linear(normed, *layer.qkv).view(len(token_ids), -1, self._head_dim)
            rotated = _rotate(self._norm_heads(heads[:, :num_rotated], layer), cos, sin)
            cache.write(index, slots, positions, rotated[:, self._num_heads :], heads[:, num_rotated:])
            queries = rotated[:, : self._num_heads]
            mixed = attend(queries, cache.keys[index], cache.values[index], groups, self._scale)
            hidden = hidden + F.linear(mixed, *layer.output)
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.post_norm, eps)
            gate, up = F.linear(normed, *layer.gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, *layer.down)

        if len(step.slots) < len(token_ids):
            hidden = hidden[torch.from_numpy(step.last_tokens).to(device)]
        hidden = F.rms_norm(hidden, hidden.shape[-1:], self._final_norm, eps)
        return F.linear(hidden, self._unembedding).float()

    def _norm_heads(self, heads: Tensor, layer: LayerWeights) -> Tensor:
        """Query and key norms (Qwen3) of heads [N, heads + kv_heads, head_dim], in one pass."""
        if layer.query_norm is None or layer.key_norm is None:
            return heads
        weight = torch.cat((layer.query_norm.expand(self._num_heads, -1), layer.key_norm.expand(self._num_kv_heads, -1)))
        return F.rms_norm(heads, heads.shape[-1:], eps=self._eps) * weight


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of heads [N, heads, head_dim] by tables [N, 1, head_dim]."""
    first, second = heads.chunk(2, -1)
    return (heads * cos).addcmul_(torch.cat((second, first), -1), sin)


def _layer_weights(layer: Any, has_head_norms: bool) -> LayerWeights:
    attention = layer.self_attn
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=fused_qkv(layer),
        query_norm=attention.q_norm.weight.detach() if has_head_norms else None,
        key_norm=attention.k_norm.weight.detach() if has_head_norms else None,
        output=_detached(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=fused_gate_up(layer),
        down=_detached(layer.mlp.down_proj),
    )


def _detached(linear: nn.Linear) -> FusedLinear:
    return FusedLinear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
