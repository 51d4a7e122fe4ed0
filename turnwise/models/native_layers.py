"""Decoder layers of the plain shape trained by the library's own kernels between matrix products: float32 on a CPU.

transformers' modules stay, with their parameters, hooks and adapters. Their own forward passes run wherever the kernels don't
fit: another device or dtype, autocast, a cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from turnwise.kernels.build import load_kernels
from turnwise.models.fused import has_plain_shape
from turnwise.models.packed_attention import PACKED_ATTENTION, packed_attention

Forward = Callable[..., Any]


def use_native_layers(model: PreTrainedModel) -> bool:
    """Lets a model of the plain shape run its norms, rotations and gates on own kernels, in place; whether it does now.

    Asked again, it does nothing. Attention must be the packed one: it's told where sequences lie.
    """
    is_packed = model.config._attn_implementation == PACKED_ATTENTION
    if not is_packed or not has_plain_shape(model) or model.device.type != "cpu" or model.dtype != torch.float32:
        return False
    kernels = load_kernels()
    if kernels is None:
        return False
    body = model.base_model
    for layer in body.layers:
        _replace(layer.input_layernorm, _norm_forward)
        _replace(layer.post_attention_layernorm, _norm_forward)
        _replace(layer.self_attn, _attention_forward)
        _replace(layer.mlp, _mlp_forward)
    _replace(body.norm, _norm_forward)
    return True


class NormRotate(torch.autograd.Function):
    """Heads x [N, heads, D] normed by `weight` [D] where given (RMS; Zhang & Sennrich 2019), then rotated by `cosines` and
    `sines` [N, D] where given (Su et al. 2021)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        cosines: Tensor | None,
        sines: Tensor | None,
        kernels: ctypes.CDLL,
    ) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        pointers = _pointer(x), _pointer(weight), eps, _pointer(cosines), _pointer(sines), _pointer(out)
        kernels.norm_rotate(*pointers, *x.shape, torch.get_num_threads())
        ctx.save_for_backward(x, weight, cosines, sines)
        ctx.eps, ctx.kernels = eps, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cosines, sines = ctx.saved_tensors
        grad, x_grad = grad.contiguous(), torch.empty_like(x)
        weight_grad = None if weight is None else torch.empty_like(weight)
        pointers = [_pointer(tensor) for tensor in (cosines, sines, x_grad, weight_grad)]
        inputs = _pointer(grad), _pointer(x), _pointer(weight), ctx.eps
        if ctx.kernels.norm_rotate_backward(*inputs, *pointers, *x.shape, torch.get_num_threads()):
            raise MemoryError("no memory is left for the gradient of a norm's weight")
        return x_grad, weight_grad, None, None, None, None


class Gate(torch.autograd.Function):
    """silu(gate) · up, both [N, D] (Shazeer 2020)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: ctypes.CDLL) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        kernels.gate_forward(_pointer(gate), _pointer(up), _pointer(out), *gate.shape, torch.get_num_threads())
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad, gate_grad, up_grad = grad.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        pointers = [_pointer(tensor) for tensor in (grad, gate, up, gate_grad, up_grad)]
        ctx.kernels.gate_backward(*pointers, *gate.shape, torch.get_num_threads())
        return gate_grad, up_grad, None


def _norm_forward(module: Any, hidden_states: Tensor) -> Tensor:
    kernels = _kernels_for(hidden_states, module.weight)
    if kernels is None:
        return type(module).forward(module, hidden_states)
    rows = hidden_states.reshape(-1, 1, hidden_states.shape[-1])
    normed: Tensor = NormRotate.apply(rows, module.weight, module.variance_epsilon, None, None, kernels)
    return normed.view(hidden_states.shape)


def _mlp_forward(module: Any, x: Tensor) -> Tensor:
    kernels = _kernels_for(x)
    if kernels is None:
        return type(module).forward(module, x)
    gate, up = module.gate_proj(x), module.up_proj(x)
    size = gate.shape[-1]
    return module.down_proj(Gate.apply(gate.view(-1, size), up.view(-1, size), kernels).view(gate.shape))


def _attention_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    kernels, sequences = _kernels_for(hidden_states, *position_embeddings), kwargs.get("sequences")
    if kernels is None or sequences is None or past_key_values is not None:
        return type(module).forward(module, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
    num_tokens = hidden_states.shape[1]
    cosines, sines = (table[0].contiguous() for table in position_embeddings)

    def rotated(projection: nn.Module, norm: Any) -> Tensor:
        heads = projection(hidden_states).view(num_tokens, -1, module.head_dim)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
        turned: Tensor = NormRotate.apply(heads, weight, eps, cosines, sines, kernels)
        return turned.transpose(0, 1)[None]

    norms = (module.q_norm, module.k_norm) if "q_norm" in module._modules else (None, None)
    queries, keys = rotated(module.q_proj, norms[0]), rotated(module.k_proj, norms[1])
    values = module.v_proj(hidden_states).view(num_tokens, -1, module.head_dim).transpose(0, 1)[None]
    mixed, _ = packed_attention(module, queries, keys, values, None, scaling=module.scaling, sequences=sequences)
    return module.o_proj(mixed.reshape(1, num_tokens, -1)), None


def _kernels_for(*tensors: Tensor) -> ctypes.CDLL | None:
    """The kernels, where they are made for these tensors."""
    if torch.is_autocast_enabled("cpu") or any(t.device.type != "cpu" or t.dtype != torch.float32 for t in tensors):
        return None
    return load_kernels()


def _replace(module: nn.Module, forward: Forward) -> None:
    module.forward = MethodType(forward, module)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
