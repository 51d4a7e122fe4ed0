from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_model import toy_model

from turnwise.errors import ModelError
from turnwise.models.load import (
    load_model,
    load_tokenizer,
    parse_dtype,
    save_model,
    stop_token_ids,
    written_whole,
)
from turnwise.models.packed_attention import PACKED_ATTENTION


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_attention_and_dtype(tiny_model: Path) -> None:
    assert load_model(tiny_model).config._attn_implementation == PACKED_ATTENTION
    assert load_model(tiny_model, attn_implementation="eager").config._attn_implementation == "eager"
    assert load_model(tiny_model, dtype=parse_dtype("bf16")).dtype == torch.bfloat16
    with pytest.raises(ModelError, match="allowed are fp32, bf16, fp16"):
        parse_dtype("float8")
    with pytest.raises(ModelError, match="allowed are auto, sdpa, eager, fa2"):
        load_model(tiny_model, attn_implementation="flash")


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only without CUDA")
def test_flash_attention_is_refused_without_cuda(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="fa2 needs a CUDA device"):
        load_model(tiny_model, attn_implementation="fa2")


def test_a_missing_folder_names_the_command_that_makes_one(tmp_path: Path) -> None:
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match=r"no such model folder; make one with `turnwise make-model"):
            load(tmp_path / "nothing")


def test_missing_weights_and_an_unknown_architecture(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors.*up_proj"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="can't be loaded"):
        load_model(folder)
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match=r"config\.json can't be used"):
        load_model(folder)


def test_no_tokenizer_and_no_chat_template(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="no chat template"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize("is_tied", [True, False])
def test_views_of_one_tensor_are_saved_as_own_tensors(tmp_path: Path, is_tied: bool) -> None:
    model = toy_model(tie_word_embeddings=is_tied)
    attention = model.model.layers[0].self_attn
    rows = [p.weight.shape[0] for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    fused = torch.cat([p.weight.detach() for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
    for projection, view in zip(
        (attention.q_proj, attention.k_proj, attention.v_proj), fused.split(rows), strict=True
    ):
        projection.weight = torch.nn.Parameter(view)
    save_model(model, None, tmp_path / "m")
    save_model(model, None, tmp_path / "m")
    loaded = load_model(tmp_path / "m")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert ("lm_head.weight" in load_file(tmp_path / "m" / "model.safetensors")) is not is_tied
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_folder_that_cannot_be_written_whole_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    with written_whole(folder) as partial:
        (partial / "a").write_text("old")
    with pytest.raises(OSError), written_whole(folder) as partial:
        (partial / "a").write_text("new")
        raise OSError("disk full")
    assert (folder / "a").read_text() == "old"
    rename = Path.rename
    with monkeypatch.context() as patched, pytest.raises(FileNotFoundError):
        patched.setattr(
            Path, "rename", lambda path, to: rename(path / "gone" if path.suffix == ".partial" else path, to)
        )
        with written_whole(folder) as partial:
            (partial / "a").write_text("new")
    assert (folder / "a").read_text() == "old"
    with written_whole(folder) as partial:
        assert not list(partial.iterdir()), "what is left of a failed attempt is dropped"
        (partial / "b").write_text("new")
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([2, 0], (2, 0)), (None, ())])
def test_stop_tokens_are_those_of_the_generation_config(
    eos: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    model = toy_model()
    model.generation_config.eos_token_id = eos
    assert stop_token_ids(model.generation_config) == expected
