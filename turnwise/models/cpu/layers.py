"""Decoder layers of Llama, Qwen2, Qwen3 and Mistral with turnwise's own kernels between matrix products, in
float32 on a CPU. transformers' modules stay, with their parameters, hooks and adapters; only `forward` of
each module is replaced. The module's original forward pass runs where the kernels don't fit: on another
device or dtype, under autocast, or with a KV cache."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from turnwise.models.cpu.build import load_kernels
from turnwise.models.fused import fuse_projections, has_plain_body, joined, supports_fast_path
from turnwise.models.packed_attention import PACKED_ATTENTION, packed_attention


def use_native_layers(model: PreTrainedModel) -> bool:
    """Makes the model's norms, rotary embeddings and gates run on turnwise's own kernels if possible; returns
    whether they do. A second call changes nothing. The model needs packed attention, which knows where
    sequences begin. Projections with the same input are fused (`models.fused`) if possible, so that one
    matrix product computes them together."""
    is_packed = model.config._attn_implementation == PACKED_ATTENTION
    if not is_packed or not _fits(model) or load_kernels() is None:
        return False
    if supports_fast_path(model):
        fuse_projections(model)
    body = model.base_model
    for layer in body.layers:
        _replace(layer.input_layernorm, _norm_forward)
        _replace(layer.post_attention_layernorm, _norm_forward)
        _replace(layer.self_attn, _attention_forward)
        _replace(layer.mlp, _mlp_forward)
    _replace(body.norm, _norm_forward)
    return True


def uses_native_layers(model: PreTrainedModel) -> bool:
    """Whether `use_native_layers` has changed this model, and the model is still in float32 on the CPU."""
    if not _fits(model):
        return False
    forward = vars(model.base_model.layers[0].mlp).get("forward")
    return isinstance(forward, partial) and forward.func is _mlp_forward


def _fits(model: PreTrainedModel) -> bool:
    return model.device.type == "cpu" and model.dtype == torch.float32 and has_plain_body(model)


class RMSNorm(torch.autograd.Function):
    """x [N, D] / √(mean x² + eps) · weight (Zhang & Sennrich 2019)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        kernels: ctypes.CDLL,
    ) -> Tensor:
        x = x.contiguous()
        weight = weight.contiguous()
        out = torch.empty_like(x)
        kernels.rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            *x.shape,
            torch.get_num_threads(),
        )
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        x_grad = torch.empty_like(x)
        weight_grad = _heads_backward(
            ctx,
            grad[:, None],
            x,
            weight,
            None,
            x_grad,
            ctx.needs_input_grad[1],
        )
        return x_grad, weight_grad, None, None


class SplitHeads(torch.autograd.Function):
    """Queries [N, H, D], keys and values [N, Hkv, D] out of `qkv` [N, (H + 2 Hkv) · D]. Queries and keys get
    an RMS norm if their weights [D] are given (Qwen3), and are rotated by `tables`, cosines and sines [N, D]
    (Su et al. 2021)."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        tables: tuple[Tensor, Tensor],
        eps: float,
        num_heads: tuple[int, int],
        kernels: ctypes.CDLL,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        num_tokens, stride = qkv.shape
        dim = tables[0].shape[1]
        num_queries, num_keys = num_heads
        query, key, value = qkv.split([num_queries * dim, num_keys * dim, num_keys * dim], 1)
        cosines, sines = tables
        outputs = []
        for part, weight, count in ((query, q_weight, num_queries), (key, k_weight, num_keys)):
            out = qkv.new_empty(num_tokens, count, dim)
            kernels.norm_rotate(
                part.data_ptr(),
                stride,
                _pointer(weight),
                eps,
                cosines.data_ptr(),
                sines.data_ptr(),
                out.data_ptr(),
                *out.shape,
                torch.get_num_threads(),
            )
            outputs.append(out)
        ctx.save_for_backward(qkv, q_weight, k_weight, *tables)
        ctx.eps = eps
        ctx.kernels = kernels
        return outputs[0], outputs[1], value.reshape(num_tokens, -1, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, *tables = ctx.saved_tensors
        qkv_grad = torch.empty_like(qkv)
        sizes = [grad.shape[1] * grad.shape[2] for grad in (q_grad, k_grad, v_grad)]
        query, key, _ = qkv.split(sizes, 1)
        query_grad, key_grad, value_grad = qkv_grad.split(sizes, 1)
        needs = ctx.needs_input_grad
        q_weight_grad = _heads_backward(ctx, q_grad, query, q_weight, tables, query_grad, needs[1])
        k_weight_grad = _heads_backward(ctx, k_grad, key, k_weight, tables, key_grad, needs[2])
        value_grad.copy_(v_grad.flatten(1))
        return qkv_grad, q_weight_grad, k_weight_grad, None, None, None, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) · up [N, D], where gate and up are the halves of `gate_up` [N, 2 D] (Shazeer 2020)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kernels: ctypes.CDLL) -> Tensor:
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), *out.shape, torch.get_num_threads())
        ctx.save_for_backward(gate_up)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        grad = grad.contiguous()
        gate_up_grad = torch.empty_like(gate_up)
        pointers = grad.data_ptr(), gate_up.data_ptr(), gate_up_grad.data_ptr()
        ctx.kernels.silu_mul_backward(*pointers, *grad.shape, torch.get_num_threads())
        return gate_up_grad, None


class JoinedLinear(torch.autograd.Function):
    """Outputs [N, ΣO] of linear layers side by side. `weight` [ΣO, I] is `joined(weights)`; `weights` get its
    gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = [len(part) for part in weights]
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_grad = grad @ weight if ctx.needs_input_grad[0] else None
        needs = ctx.needs_input_grad[2:]
        if not any(needs):
            return x_grad, None, *(None for _ in needs)
        weight_grad = grad.flatten(0, -2).T @ x.flatten(0, -2)
        grads: list[Tensor | None] = []
        for part, is_needed in zip(weight_grad.split(ctx.sizes), needs, strict=True):
            grads.append(part if is_needed else None)
        return x_grad, None, *grads


def _heads_backward(
    ctx: Any,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    tables: Sequence[Tensor] | None,
    x_grad: Tensor,
    needs_weight_grad: bool,
) -> Tensor | None:
    """The gradient of `weight`, if needed, from `grad` [N, heads, D], the gradient of the normed and rotated
    heads. Writes the gradient of `x` to `x_grad`, which has the layout of `x`."""
    grad = grad.contiguous()
    weight_grad = torch.empty_like(weight) if needs_weight_grad and weight is not None else None
    cosines, sines = tables or (None, None)
    has_failed = ctx.kernels.norm_rotate_backward(
        grad.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        _pointer(weight),
        ctx.eps,
        _pointer(cosines),
        _pointer(sines),
        x_grad.data_ptr(),
        _pointer(weight_grad),
        *grad.shape,
        torch.get_num_threads(),
    )
    if has_failed:
        raise MemoryError("no memory is left for the gradient of a norm's weight")
    return weight_grad


def _norm_forward(module: Any, hidden_states: Tensor) -> Tensor:
    kernels = _kernels_for(hidden_states, module.weight)
    if kernels is None:
        return type(module).forward(module, hidden_states)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    normed: Tensor = RMSNorm.apply(rows, module.weight, module.variance_epsilon, kernels)
    return normed.view(hidden_states.shape)


def _mlp_forward(module: Any, x: Tensor) -> Tensor:
    if _kernels_for(x) is None or _is_watched(module.act_fn):
        return type(module).forward(module, x)
    gate_up = _together(x, module.gate_proj, module.up_proj)
    kernels = _kernels_for(gate_up)
    if kernels is None:
        # Adapters may have outputs of another dtype.
        gate, up = gate_up.chunk(2, -1)
        return module.down_proj(module.act_fn(gate) * up)
    gated = SwiGLU.apply(gate_up.flatten(0, -2), kernels)
    return module.down_proj(gated.view(*x.shape[:-1], -1))


def _attention_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    norms = [module._modules[name] for name in ("q_norm", "k_norm") if name in module._modules]
    kernels = _kernels_for(hidden_states, *position_embeddings, *(norm.weight for norm in norms))
    original = partial(
        type(module).forward,
        module,
        hidden_states,
        position_embeddings,
        attention_mask,
        past_key_values,
        **kwargs,
    )
    sequences = kwargs.get("sequences")
    drops = module.training and module.attention_dropout > 0
    if kernels is None or sequences is None or drops:
        return original()
    if past_key_values is not None or any(map(_is_watched, norms)):
        return original()
    num_tokens = hidden_states.shape[1]
    qkv = _together(hidden_states[0], module.q_proj, module.k_proj, module.v_proj)
    if _kernels_for(qkv) is None:
        return original()
    num_rows = qkv.shape[1] // module.head_dim
    num_kv_heads = num_rows // (module.num_key_value_groups + 2)
    q_weight = None
    k_weight = None
    eps = 0.0
    if norms:
        q_norm, k_norm = norms
        q_weight = q_norm.weight
        k_weight = k_norm.weight
        eps = q_norm.variance_epsilon
    tables = tuple(table[0].contiguous() for table in position_embeddings)
    num_heads = (num_rows - 2 * num_kv_heads, num_kv_heads)
    heads = SplitHeads.apply(qkv, q_weight, k_weight, tables, eps, num_heads, kernels)
    query, key, value = (part.transpose(0, 1)[None] for part in heads)
    mixed, _ = packed_attention(
        module,
        query,
        key,
        value,
        None,
        scaling=module.scaling,
        sequences=sequences,
    )
    return module.o_proj(mixed.reshape(1, num_tokens, -1)), None


def _together(x: Tensor, *projections: nn.Module) -> Tensor:
    """Outputs of the projections side by side, by one product if all projections are plain linear layers and
    fused."""
    linears = [linear for linear in projections if type(linear) is nn.Linear and not _is_watched(linear)]
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    weight = None
    if len(linears) == len(projections) and len(biases) in (0, len(linears)):
        weight = joined(weights)
    if weight is None:
        return torch.cat([projection(x) for projection in projections], -1)
    outputs: Tensor = JoinedLinear.apply(x, weight, *weights)
    if not biases:
        return outputs
    return outputs + torch.cat(biases)


def _is_watched(module: nn.Module) -> bool:
    """Whether the module's call has a hook, or its `forward` was replaced."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)


def _kernels_for(*tensors: Tensor) -> ctypes.CDLL | None:
    """The kernels; None if there are none, under autocast, or unless tensors are plain (no DTensor), float32
    and on a CPU."""
    if torch.is_autocast_enabled("cpu"):
        return None
    for tensor in tensors:
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        if not is_plain or tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            return None
    return load_kernels()


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replaces `forward`, unless that is done already. A `partial` is pickled with its module; a bound method
    wouldn't be."""
    if "forward" not in vars(module):
        module.forward = partial(forward, module)


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    return tensor.data_ptr()
