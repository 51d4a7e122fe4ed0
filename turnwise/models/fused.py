"""Fused projections: q/k/v and gate/up weights of a layer as views of one tensor, shared by trainer and
engine.

The trainer still has the parameters `q_proj.weight`, `k_proj.weight` and `v_proj.weight`, but their storage
is one tensor. So the engine needs one product instead of three, and reads what an in-place optimiser step or
`load_state_dict` writes. Whether tensors are fused is read off their addresses. (`models.cpu.forward` reads a
copy of the weights instead.)"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.errors import ModelError
from turnwise.models.load import load_model

_MODEL_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
_BODY_CLASSES = ("LlamaModel", "Qwen2Model", "Qwen3Model", "MistralModel")
_RUNTIME_ROPE = ("dynamic", "longrope")  # rotary embeddings whose frequencies depend on the sequence length


class FusedLinear(NamedTuple):
    """Several linear layers with the same input as one: weight [sum of outputs, inputs], bias [sum of
    outputs] or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    """The ε of all norms."""


class LayerWeights(NamedTuple):
    """One decoder layer's parameters. The tensors share the model's memory, except for `head_norms`."""

    input_norm: Tensor
    qkv: FusedLinear
    head_norms: Tensor | None
    """[heads + kv_heads, head_dim]: copies of the norms of queries and keys (Qwen3), or None."""
    output: FusedLinear
    post_norm: Tensor
    gate_up: FusedLinear
    down: FusedLinear


def fast_path_obstacle(model: PreTrainedModel) -> str | None:
    """Why projections can't be fused, as text for messages: the model isn't a causal language model of the
    family of Llama, Qwen2, Qwen3 or Mistral; it has an activation other than SiLU, a sliding window, or a
    RoPE that depends on the sequence length; or a projection isn't a plain `nn.Linear`. None if they can."""
    name = type(model).__name__
    if name not in _MODEL_CLASSES:
        return f"{name} isn't one of {', '.join(_MODEL_CLASSES)}"
    obstacle = _obstacle_of_body(model)
    if obstacle is not None:
        return obstacle
    for layer in model.model.layers:
        for linear in (*qkv(layer), layer.self_attn.o_proj, *gate_up(layer), layer.mlp.down_proj):
            if type(linear) is not nn.Linear:
                return f"a projection is a {type(linear).__name__}, not a plain Linear"
    return None


def has_plain_body(model: PreTrainedModel) -> bool:
    """Whether `fast_path_obstacle` allows the model's layers, whatever its head is, and even if projections
    have adapters."""
    return type(model.base_model).__name__ in _BODY_CLASSES and _obstacle_of_body(model) is None


def _obstacle_of_body(model: PreTrainedModel) -> str | None:
    config = model.config.to_dict()
    if config["hidden_act"] != "silu":
        return f"its hidden_act is {config['hidden_act']!r}, not 'silu'"
    has_window = config.get("sliding_window") is not None
    layer_types = config.get("layer_types") or ()
    if has_window and (config["model_type"] == "mistral" or "sliding_attention" in layer_types):
        return f"it attends to a sliding window of {config['sliding_window']} tokens"
    rope_type = (config.get("rope_parameters") or {}).get("rope_type", "default")
    if rope_type in _RUNTIME_ROPE:
        return f"its rotary embedding {rope_type!r} depends on the sequence length"
    return None


def supports_fast_path(model: PreTrainedModel) -> bool:
    """Whether projections can be fused (`fast_path_obstacle`)."""
    return fast_path_obstacle(model) is None


def fuse_projections(model: PreTrainedModel) -> None:
    """Makes each layer's q/k/v weights views of one tensor, in place; likewise biases and gate/up. A second
    call does nothing. Parameters stay the same objects with the same values, so existing optimisers still
    work. Moving the model to another device or dtype, or copying it, undoes the fusion: call this again.
    Raises ModelError if `fast_path_obstacle` finds an obstacle."""
    obstacle = fast_path_obstacle(model)
    if obstacle is not None:
        raise ModelError(
            f"projections can't be fused: {obstacle}. Models of another shape run their own forward pass."
        )
    for layer in model.model.layers:
        for linears in (qkv(layer), gate_up(layer)):
            _lay_together([linear.weight for linear in linears])
            biases = [linear.bias for linear in linears if linear.bias is not None]
            if biases:
                _lay_together(biases)


def load_fused(path: str, **options: Any) -> PreTrainedModel:
    """`load_model`, with fused projections if they can be fused."""
    model = load_model(path, **options)
    if supports_fast_path(model):
        fuse_projections(model)
    return model


def qkv(layer: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj


def gate_up(layer: Any) -> tuple[nn.Linear, nn.Linear]:
    return layer.mlp.gate_proj, layer.mlp.up_proj


def _lay_together(parameters: Sequence[Tensor]) -> None:
    if joined(parameters) is not None:
        return
    fused = torch.cat([parameter.detach() for parameter in parameters])
    parts = fused.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors concatenated, without a copy and without gradients; None if they don't follow one another
    in memory."""
    first = tensors[0].detach()
    offset = first.storage_offset()
    for tensor in tensors:
        is_same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_same or tensor.storage_offset() != offset or not tensor.is_contiguous():
            return None
        offset += tensor.numel()
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def fused(linears: Sequence[nn.Linear]) -> FusedLinear:
    """The linear layers of `qkv` or `gate_up` as one. Raises ModelError if `fuse_projections` wasn't called,
    or the model was moved or copied since."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weight = joined([linear.weight for linear in linears])
    bias = joined(biases) if biases else None
    if weight is None or (biases and bias is None):
        raise ModelError(
            "the projections of a layer aren't fused: call fuse_projections(model) after moving or copying it"
        )
    return FusedLinear(weight, bias)
