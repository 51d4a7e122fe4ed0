"""The fast path: turnwise's own forward pass of models like Llama, Qwen2, Qwen3 and Mistral, over fused
projections. It reads the model's own parameters. For a small float32 model on a CPU it runs turnwise's own
kernels, over a copy of the parameters in the kernels' memory order. `refresh` renews the copy."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.errors import ModelError
from turnwise.inference.embedded.cache import KVCache
from turnwise.inference.embedded.decoder_layer import TorchOps
from turnwise.inference.embedded.runner import PackedStep
from turnwise.models.cpu.build import LANES, load_kernels
from turnwise.models.cpu.forward import NativeForward
from turnwise.models.fused import FusedLinear, HeadShape, LayerWeights, fuse_projections, fused, gate_up, qkv
from turnwise.spec import MAX_PACKED_BYTES

_BLOCK_TOKENS = 1024
"""Tokens that pass all layers together on a CPU, so that a layer's output stays in the CPU's caches."""


class FusedRunner:
    """The `Runner` of models that `models.fused.supports_fast_path` accepts. It fuses the model's
    projections, and keeps keys and values in a `KVCache`. Turnwise's own kernels run for small models in
    float32 on a CPU, unless `may_be_native` is False. Raises ConfigError if `kv_cache_bytes` has no room for
    one sequence of `max_length` tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_length: int,
        kv_cache_bytes: int,
        may_be_native: bool = True,
    ) -> None:
        self._model = model
        self._max_length = max_length
        attention = model.model.layers[0].self_attn
        self._shape = HeadShape(
            num_heads=model.config.num_attention_heads,
            num_kv_heads=model.config.num_key_value_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            eps=model.config.rms_norm_eps,
        )
        self._may_be_native = may_be_native
        self._cache = KVCache(
            num_layers=len(model.model.layers),
            num_kv_heads=self._shape.num_kv_heads,
            head_dim=self._shape.head_dim,
            max_length=max_length,
            num_bytes=kv_cache_bytes,
            dtype=model.dtype,
            device=model.device,
        )
        self.max_slots = self._cache.max_slots
        self.can_copy = True
        self.refresh()

    def refresh(self, cached_slots: Sequence[int] = ()) -> None:
        model = self._model
        body = model.model
        if model.dtype != self._cache.dtype or model.device != self._cache.device:
            raise ModelError(
                f"the model was served in {self._cache.dtype} on {self._cache.device} and is now in "
                f"{model.dtype} on {model.device}; make a new server for it, or move it back before `resume`"
            )
        if not cached_slots:
            self._cache.prefixes.clear()
        fuse_projections(model)
        self._layers = [self._layer_weights(layer) for layer in body.layers]
        self._embedding = body.embed_tokens.weight.detach()
        self._final_norm = body.norm.weight.detach()
        self._lm_head = model.lm_head.weight.detach()
        positions = torch.arange(self._max_length, device=model.device)[None]
        cos, sin = body.rotary_emb(self._embedding, positions)
        # With negated sines in the table, the two halves of a head only need to be swapped.
        half = self._shape.head_dim // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        self._rotary = torch.stack((cos[0], sin[0]), 1)
        self._native = None  # frees its copy of the weights before another is made
        self._native = self._native_forward()
        self.name = "fused" if self._native is None else "fused (own kernels)"

    def _native_forward(self) -> NativeForward | None:
        parameters = list(self._model.parameters())
        dtypes = {parameter.dtype for parameter in parameters}
        is_plain = self._model.device.type == "cpu" and dtypes == {torch.float32}
        is_small = sum(parameter.nbytes for parameter in parameters) <= MAX_PACKED_BYTES
        fits = is_plain and is_small and not self._shape.head_dim % LANES
        kernels = load_kernels() if fits and self._may_be_native else None
        if kernels is None:
            return None
        return NativeForward(
            kernels,
            self._layers,
            self._shape,
            embedding=self._embedding,
            rotary=self._rotary,
            final_norm=self._final_norm,
            lm_head=self._lm_head,
        )

    def _layer_weights(self, layer: Any) -> LayerWeights:
        attention = layer.self_attn
        head_norms = None
        if type(self._model).__name__ == "Qwen3ForCausalLM":
            norms = [attention.q_norm.weight.detach()] * self._shape.num_heads
            norms += [attention.k_norm.weight.detach()] * self._shape.num_kv_heads
            head_norms = torch.stack(norms)
        return LayerWeights(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=fused(qkv(layer)),
            head_norms=head_norms,
            output=_detached(attention.o_proj),
            post_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=fused(gate_up(layer)),
            down=_detached(layer.mlp.down_proj),
        )

    def reserve(self, num_slots: int, length: int) -> None:
        self._cache.reserve(num_slots, length)

    def usable_prefix(self, slot: int, num_cached: int, num_common: int) -> int:
        self._cache.prefixes.keep(slot, num_common)
        return num_common

    def copy_prefix(self, source: int, target: int, start: int, stop: int) -> None:
        copy = self._cache.copy if self._native is None else self._cache.prefixes.share
        copy(source, target, start, stop)

    def free(self) -> None:
        self._cache.free()

    def forward(self, step: PackedStep) -> Tensor:
        if self._embedding.is_cuda or len(step.token_ids) <= _BLOCK_TOKENS:
            return self._forward(step)
        return torch.cat([self._forward(block) for block in step.cut(_BLOCK_TOKENS)])

    def _forward(self, step: PackedStep) -> Tensor:
        if self._native is not None:
            cache = self._cache
            return self._native(
                step.token_ids,
                step.slots[step.rows],
                step.positions,
                step.last_tokens,
                cache.keys,
                cache.values,
                cache.prefixes.bases,
                cache.prefixes.splits,
            )
        device = self._embedding.device
        ops = TorchOps(step, self._shape, self._cache, self._rotary)
        hidden = F.embedding(torch.from_numpy(step.token_ids).to(device), self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = F.linear(ops.rms_norm(hidden, layer.input_norm), *layer.qkv)
            queries = ops.place_heads(index, qkv, layer.head_norms)
            if index == len(self._layers) - 1 and len(step.last_tokens) < len(step.token_ids):
                # Of all other tokens, the last layer needs keys and values only.
                if not len(step.last_tokens):
                    return hidden.new_empty(0, len(self._lm_head), dtype=torch.float32)
                last_tokens = torch.from_numpy(step.last_tokens).to(device)
                hidden = hidden[last_tokens]
                queries = queries[last_tokens]
                ops = TorchOps(step.tail(), self._shape, self._cache, self._rotary)
            _add_linear(hidden, ops.attend(index, queries), layer.output)
            gate_up = F.linear(ops.rms_norm(hidden, layer.post_norm), *layer.gate_up)
            _add_linear(hidden, ops.silu_mul(gate_up), layer.down)
        return F.linear(ops.rms_norm(hidden, self._final_norm), self._lm_head).float()


def _add_linear(hidden: Tensor, x: Tensor, linear: FusedLinear) -> None:
    if linear.bias is not None:
        hidden += linear.bias
    hidden.addmm_(x, linear.weight.t())


def _detached(linear: nn.Linear) -> FusedLinear:
    bias = None if linear.bias is None else linear.bias.detach()
    return FusedLinear(linear.weight.detach(), bias)
