"""`turnwise export`: an adapter's folder becomes a plain model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from messages import mentions
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.cli.main import main
from turnwise.models.load import load_model, load_tokenizer
from turnwise.models.lora import Adapters, LoRASettings


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    adapters = Adapters(load_model(tiny_model), LoRASettings(rank=2, alpha=4), base=str(tiny_model))
    with torch.no_grad():
        for parameter in adapters.model.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.05)
    adapters.save(folder)
    load_tokenizer(tiny_model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("words", "dtype"), [([], torch.float32), (["--dtype", "bf16"], torch.bfloat16)])
def test_an_adapter_is_merged_into_a_folder_that_needs_nothing_else(
    adapter: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    dtype: torch.dtype,
) -> None:
    out = tmp_path / "plain"
    assert main(["export", "--model", str(adapter), "--out", str(out), *words]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith(f"{out}: Qwen3ForCausalLM")
        and f"{tiny_model} with the adapter of {adapter} merged" in said
    )
    plain, merged = AutoModelForCausalLM.from_pretrained(out), load_model(adapter, dtype=dtype)
    assert plain.dtype == dtype
    assert all(torch.equal(tensor, merged.get_parameter(name)) for name, tensor in plain.named_parameters())
    assert plain.generation_config.eos_token_id == merged.generation_config.eos_token_id
    assert AutoTokenizer.from_pretrained(out).get_vocab() == load_tokenizer(tiny_model).get_vocab()
    assert not list(out.glob("adapter*"))


def test_bad_input(adapter: Path, folder: Path, refused: Callable[..., str]) -> None:
    assert "no such model folder" in refused("export", "--model", "nowhere", "--out", "a")
    assert "already exists" in refused("export", "--model", adapter, "--out", adapter)
    (folder / "file").touch()
    for out in ("file/model", "x" * 300):
        assert "name another" in refused("export", "--model", adapter, "--out", out)
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "moved/away/base"}')
    assert mentions(refused("export", "--model", adapter, "--out", "b"), "base model", "moved/away/base")
    assert not (folder / "b").exists()
