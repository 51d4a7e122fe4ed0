from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_model import toy_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from turnwise.errors import ModelError
from turnwise.models.fused import fuse_projections, fused, gate_up, qkv, supports_fast_path


def make_model() -> PreTrainedModel:
    return toy_model(model_type="qwen2", attn_implementation="sdpa", tie_word_embeddings=False)


def assert_fused_equals_parts(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        assert torch.equal(fused(qkv(layer)).weight, torch.cat([linear.weight for linear in projections]))
        assert torch.equal(fused(qkv(layer)).bias, torch.cat([linear.bias for linear in projections]))
        assert torch.equal(
            fused(gate_up(layer)).weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        )
        assert fused(gate_up(layer)).bias is None


def test_fusing_keeps_values_parameters_and_is_idempotent() -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    fuse_projections(model)
    place = fused(qkv(model.model.layers[0])).weight.data_ptr()
    fuse_projections(model)
    assert fused(qkv(model.model.layers[0])).weight.data_ptr() == place
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert_fused_equals_parts(model)


@pytest.mark.parametrize("foreach", [False, True])
def test_optimiser_steps_and_loaded_weights_show_up_in_the_fused_tensors(foreach: bool) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
    fuse_projections(model)
    whole = fused(qkv(model.model.layers[1]))
    before = whole.weight.clone()
    ids = torch.arange(10)[None]
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(whole.weight, before)
    assert_fused_equals_parts(model)
    model.load_state_dict(make_model().state_dict())
    assert torch.equal(whole.weight, before)
    model.requires_grad_(False)
    assert_fused_equals_parts(model)


def test_training_is_the_same_with_and_without_fusion() -> None:
    models = make_model(), make_model()
    fuse_projections(models[0])
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ids = torch.arange(10)[None]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    for other, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(other, plain)


def test_a_fused_model_is_saved_whole(tmp_path: Path) -> None:
    model = make_model()
    fuse_projections(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_moving_or_copying_undoes_the_fusion_and_is_noticed() -> None:
    model = make_model()
    fuse_projections(model)
    for other in (copy.deepcopy(model), model.to(torch.bfloat16)):
        if not _is_fused(other):
            fuse_projections(other)
        assert_fused_equals_parts(other)


def _is_fused(model: torch.nn.Module) -> bool:
    try:
        fused(qkv(model.model.layers[0]))
    except ModelError:
        return False
    return True


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, "sliding window of 8"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "'gelu'"),
        (
            {
                "model_type": "llama",
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
            "'dynamic'",
        ),
    ],
)
def test_other_shapes_are_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    model = toy_model(attn_implementation="sdpa", **changes)
    assert not supports_fast_path(model)
    with pytest.raises(ModelError, match=reason):
        fuse_projections(model)


def test_a_mistral_without_a_window_has_the_shape() -> None:
    assert supports_fast_path(toy_model(model_type="mistral", sliding_window=None))
