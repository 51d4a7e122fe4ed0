"""A loaded model is that of its files: no tensor is left out or converted without a word."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_model import toy_model, toy_value_model

from turnwise.errors import ModelError
from turnwise.models.load import load_model, save_model
from turnwise.models.value_head import load_value_model


def with_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    return folder


def as_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(toy_model(tie_word_embeddings=False), None, tmp_path / "model")
    return tmp_path / "model"


def test_weights_of_another_architecture_are_refused_by_name(folder: Path) -> None:
    as_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    for load in (load_model, load_value_model):
        with pytest.raises(
            ModelError, match=r"4 tensors that the model doesn't have .*0.self_attn.k_norm.weight.*1 more"
        ):
            load(folder)


def test_a_score_head_is_not_dropped_from_a_policy_and_a_text_head_makes_room_in_a_critic(
    folder: Path, tmp_path: Path
) -> None:
    save_model(toy_value_model(), None, tmp_path / "reward")
    with pytest.raises(ModelError, match=r"doesn't have \(score\."):
        load_model(tmp_path / "reward")
    assert not load_value_model(folder).score.weight.any()
    assert load_value_model(tmp_path / "reward").score.weight.any()
    with pytest.raises(ModelError, match=r"doesn't have \(v_head.summary.weight\)"):
        load_value_model(with_tensors(folder, {"v_head.summary.weight": torch.ones(1, 32)}))


def test_what_transformers_lists_as_no_weight_is_left_out_and_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load_model(folder).state_dict()
    old = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.int32)
        for layer in (0, 1)
    }
    with caplog.at_level(logging.INFO):
        loaded = load_model(with_tensors(folder, old)).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    [said] = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "2 tensors" in said and "inv_freq" in said


def test_masks_of_a_gpt2_file_are_left_out(tmp_path: Path) -> None:
    model = toy_model(model_type="gpt2", attn_implementation="sdpa")
    save_model(model, None, tmp_path / "gpt2")
    masks = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool) for layer in (0, 1)}
    load_model(with_tensors(tmp_path / "gpt2", masks))


def test_a_bias_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    save_model(toy_model(attention_bias=True), None, tmp_path / "model")
    name = "model.layers.1.self_attn.q_proj.bias"
    with pytest.raises(ModelError, match=rf"{name} \(I64\)"):
        load_model(with_tensors(tmp_path / "model", {name: torch.ones(32, dtype=torch.int64)}))


def test_quantised_weights_of_an_unknown_kind_are_refused(folder: Path) -> None:
    for load in (load_model, load_value_model):
        with pytest.raises(ModelError, match="quantization_config names the method 'nope'"):
            load(as_config(folder, quantization_config={"quant_method": "nope"}))
        with pytest.raises(ModelError, match=r"config.json can't be used"):
            load(as_config(folder, quantization_config={"bits": 4}))
