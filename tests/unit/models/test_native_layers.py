"""Layers on own kernels give transformers' numbers and gradients, and step aside where they don't fit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from turnwise.models.cpu import build
from turnwise.models.cpu.layers import RMSNorm, SplitHeads, SwiGLU, use_native_layers
from turnwise.models.packed_attention import PACKED_ATTENTION, PackedSequences

kernels = build.load_kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="no C compiler")
SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, **HEADS, attention_bias=True, mlp_bias=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, **HEADS)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, **HEADS, head_dim=12)),
}
LENGTHS = [9, 4, 14]


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class, config = CONFIGS[kind]
    model = model_class(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.config._attn_implementation = PACKED_ATTENTION
    return model


def states(model: PreTrainedModel) -> Tensor:
    token_ids = torch.arange(sum(LENGTHS))[None] % 40
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    sequences = PackedSequences.of(LENGTHS, torch.device("cpu"))
    mask = torch.empty(1, 1, 0, 0)
    hidden: Tensor = model.base_model(
        input_ids=token_ids, position_ids=places, attention_mask=mask, sequences=sequences, use_cache=False
    ).last_hidden_state
    return hidden


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    (states(model) ** 3).mean().backward()
    return {name: p.grad for name, p in model.base_model.named_parameters() if p.grad is not None}


def assert_same_states(
    kind: str, change: Callable[[PreTrainedModel], None], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """Changed in this way, the model gives the same states on own kernels as on transformers'."""
    model, own = make_model(kind), make_model(kind)
    for changed in (model, own):
        change(changed)
    use_native_layers(own)
    torch.testing.assert_close(states(own), states(model), rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", CONFIGS)
def test_states_and_gradients_are_those_of_transformers(kind: str) -> None:
    model, own = make_model(kind), make_model(kind)
    assert use_native_layers(own)
    torch.testing.assert_close(states(own), states(model), rtol=1e-4, atol=1e-5)
    right = gradients(model)
    assert len(right) > 10
    for name, gradient in gradients(own).items():
        torch.testing.assert_close(
            gradient, right[name], rtol=1e-3, atol=1e-4 * float(right[name].abs().max())
        )


def test_the_kernels_did_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = make_model("qwen3"), []
    use_native_layers(own)
    for function in (RMSNorm, SplitHeads, SwiGLU):
        apply = function.apply
        monkeypatch.setattr(
            function, "apply", lambda *a, f=apply, n=function.__name__: calls.append(n) or f(*a)
        )
    states(own)
    assert [calls.count(name) for name in ("RMSNorm", "SplitHeads", "SwiGLU")] == [2 * 2 + 1, 2, 2]


class Doubled(torch.nn.Module):
    """A projection with something around it, as an adapter is."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


def test_adapters_are_asked() -> None:
    def adapt(model: PreTrainedModel) -> None:
        layer = model.base_model.layers[1]
        layer.self_attn.k_proj, layer.mlp.up_proj = (
            Doubled(layer.self_attn.k_proj),
            Doubled(layer.mlp.up_proj),
        )

    assert_same_states("llama", adapt)


class InBfloat16(Doubled):
    """An adapter that answers in another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).bfloat16()


def test_what_adapters_answer_in_another_dtype_is_left_to_torch() -> None:
    def adapt(model: PreTrainedModel) -> None:
        mlp = model.base_model.layers[0].mlp
        mlp.gate_proj, mlp.up_proj = InBfloat16(mlp.gate_proj), InBfloat16(mlp.up_proj)
        mlp.down_proj.bfloat16()

    assert_same_states("llama", adapt, rtol=1e-2, atol=1e-2)


def test_dropout_is_left_to_torch() -> None:
    own = make_model("qwen3")
    use_native_layers(own)
    expected = states(own)
    for layer in own.base_model.layers:
        layer.self_attn.attention_dropout = 0.9
    assert states(own).equal(expected)
    assert not states(own.train()).allclose(expected, atol=1e-2)


@pytest.mark.parametrize("size", [8, 20, 33])
def test_gates_far_from_zero_and_their_gradients(size: int) -> None:
    gate = torch.linspace(-100, 100, 30 * size).view(30, size)
    gate_up = torch.cat((gate, torch.randn(30, size)), 1).requires_grad_()
    own = torch.autograd.grad(SwiGLU.apply(gate_up, kernels).square().sum(), gate_up)
    right = torch.autograd.grad((F.silu(gate_up[:, :size]) * gate_up[:, size:]).square().sum(), gate_up)
    torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_weight_does_not_depend_on_the_number_of_threads() -> None:
    x, weight = torch.randn(500, 16), torch.randn(16, requires_grad=True)
    before = torch.get_num_threads()
    gradients = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        gradients += torch.autograd.grad(RMSNorm.apply(x, weight, 1e-6, kernels).cos().sum(), weight)
    torch.set_num_threads(before)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_a_copy_has_layers_of_its_own() -> None:
    model = make_model("qwen3")
    use_native_layers(model)
    copied = deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert states(copied).abs().sum() > 0
    assert states(pickle.loads(pickle.dumps(copied))).equal(states(copied))


def test_hooks_still_fire() -> None:
    own, called = make_model("qwen3"), []
    use_native_layers(own)
    attention, mlp = own.base_model.layers[0].self_attn, own.base_model.layers[0].mlp
    watched = (
        attention.q_proj,
        attention.k_norm,
        attention.o_proj,
        mlp.gate_proj,
        own.base_model.layers[1].mlp.act_fn,
    )
    expected = states(own)
    for module in watched:
        module.register_forward_hook(lambda module, *_: called.append(module))
    torch.testing.assert_close(states(own), expected, rtol=1e-4, atol=1e-5)
    assert set(called) == set(watched)


def test_a_forward_that_somebody_else_replaced_is_kept() -> None:
    own = make_model("qwen3")
    own.base_model.norm.forward = torch.zeros_like
    use_native_layers(own)
    assert not states(own).any()


def test_norms_in_another_dtype_are_left_to_torch() -> None:
    assert_same_states("qwen3", lambda model: model.base_model.layers[0].self_attn.q_norm.bfloat16())


def test_frozen_parts_get_no_gradient() -> None:
    own = make_model("qwen3")
    use_native_layers(own)
    attention = own.base_model.layers[1].self_attn
    frozen = [attention.q_proj.weight, attention.k_norm.weight, own.base_model.norm.weight]
    expected = gradients(make_model("qwen3"))["layers.1.self_attn.k_proj.weight"]
    for parameter in frozen:
        parameter.requires_grad_(False)
    found = gradients(own)
    assert all(parameter.grad is None for parameter in frozen)
    torch.testing.assert_close(found["layers.1.self_attn.k_proj.weight"], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_autocast_and_a_cache_go_transformers_way(kind: str) -> None:
    model, own = make_model(kind), make_model(kind)
    use_native_layers(own)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(states(own), states(model), rtol=0, atol=0)
    token_ids = torch.arange(6)[None]
    torch.testing.assert_close(own(token_ids, use_cache=True).logits, model(token_ids, use_cache=True).logits)


def test_other_models_are_left_as_they_are() -> None:
    padded = make_model("qwen3")
    padded.config._attn_implementation = "sdpa"
    assert not use_native_layers(padded)
    assert not use_native_layers(make_model("qwen3").bfloat16())
    assert "forward" not in vars(padded.base_model.norm)
