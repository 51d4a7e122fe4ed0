"""Adapters of other programs: each is merged into what peft computes with it, or refused with a sentence."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from toy_model import add_noise, toy_model
from transformers import PreTrainedModel

from turnwise.config import parse_config
from turnwise.errors import ConfigError, ModelError
from turnwise.models.export import export_model
from turnwise.models.load import load_model, save_model
from turnwise.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapters, LoRASettings
from turnwise.models.value_head import load_value_model
from turnwise.testing.fakes import byte_tokenizer

IDS = torch.arange(20)[None] * 13 % 260


def base_model(**config: Any) -> PreTrainedModel:
    return toy_model(**{"vocab_size": 260, "attn_implementation": "sdpa", **config})


def make_adapter(folder: Path, settings: Any, num_rows: int = 260, **config: Any) -> torch.Tensor:
    """Writes `folder/base` and, as peft does after training, `folder/adapter`. Returns what peft computes
    with the two."""
    save_model(base_model(**config), byte_tokenizer(), folder / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = base_model(**config)
        model.resize_token_embeddings(num_rows)
        model.name_or_path = str(folder / "base")
        wrapped = get_peft_model(model, settings)
        add_noise(wrapped)
        wrapped.save_pretrained(folder / "adapter")
    return logits(wrapped)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(
        **{
            "r": 2,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "down_proj"],
            "task_type": "CAUSAL_LM",
            **settings,
        }
    )


FORMS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "plain, without a task": ({"task_type": None}, {}),
    "rank-stabilised, ranks and alphas by pattern": (
        {"use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"down_proj": 3}},
        {},
    ),
    "DoRA": ({"use_dora": True}, {}),
    "PiSSA, some layers": ({"init_lora_weights": "pissa", "layers_to_transform": [1]}, {}),
    "a pattern of modules": ({"target_modules": r".*\.1\..*_proj", "exclude_modules": ["k_proj"]}, {}),
    "all biases": ({"bias": "all"}, {"attention_bias": True}),
    "biases where there are none": ({"bias": "all"}, {}),
    "biases of adapters": ({"lora_bias": True, "target_modules": ["q_proj"]}, {"attention_bias": True}),
    "untied head and embedding": (
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"tie_word_embeddings": False},
    ),
    "whole norms": ({"modules_to_save": ["norm"]}, {}),
    "some tokens": ({"trainable_token_indices": [3, 7]}, {}),
    "transposed weights": ({"target_modules": ["c_attn"], "fan_in_fan_out": True}, {"model_type": "gpt2"}),
}
PARTED = {
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "whole embedding": {"modules_to_save": ["embed_tokens"]},
    "whole head": {"modules_to_save": ["lm_head"]},
}
"""Adapters after which a tied pair of embedding and vocabulary projection differs."""


@pytest.mark.parametrize("form", FORMS)
def test_a_merged_adapter_computes_what_peft_computes(form: str, tmp_path: Path) -> None:
    settings, config = FORMS[form]
    expected = make_adapter(tmp_path, lora(**settings), **config)
    assert not torch.allclose(expected, logits(base_model(**config)), atol=1e-3), (
        "the adapter has learnt something"
    )
    merged = load_model(tmp_path / "adapter")
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    assert all(parameter.requires_grad for parameter in merged.parameters())


@pytest.mark.parametrize("form", PARTED)
def test_a_tied_pair_is_parted_where_an_adapter_changes_one_of_them(form: str, tmp_path: Path) -> None:
    expected = make_adapter(tmp_path, lora(**PARTED[form]))
    merged = load_model(tmp_path / "adapter")
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)

    export_model(tmp_path / "adapter", tmp_path / "exported")
    assert json.loads((tmp_path / "exported/config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(load_model(tmp_path / "exported")), logits(merged))

    # New adapters on the merged model: what they merge to is what an engine samples from.
    adapters = Adapters(merged, LoRASettings(2, 6))
    add_noise(adapters.model)
    engine = base_model(tie_word_embeddings=False)
    engine.load_state_dict(dict(adapters.merged_weights()))
    torch.testing.assert_close(logits(engine), logits(adapters.model), rtol=0, atol=1e-5)


def test_a_pair_that_stays_equal_stays_tied(tmp_path: Path) -> None:
    settings = lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    expected = make_adapter(tmp_path, settings)
    merged = load_model(tmp_path / "adapter")
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight and merged.config.tie_word_embeddings


# Refused


def edit(folder: Path, **changes: Any) -> None:
    file = folder / ADAPTER_CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def keep(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / ADAPTER_WEIGHTS)), folder / ADAPTER_WEIGHTS)


def without(part: str) -> Callable[[Path], None]:
    return lambda folder: keep(
        folder, lambda all_of: {name: t for name, t in all_of.items() if part not in name}
    )


def with_tensor(name: str) -> Callable[[Path], None]:
    return lambda folder: keep(
        folder, lambda all_of: {**all_of, f"base_model.model.{name}": torch.ones(2, 32)}
    )


def as_type(dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda folder: keep(
        folder, lambda all_of: {name: tensor.to(dtype) for name, tensor in all_of.items()}
    )


def set_to(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, **changes)


SEEN_BY_LOADING: list[tuple[str, Callable[[Path], None], str]] = [
    ("no tensors", lambda folder: keep(folder, lambda _: {}), r"lack 8 tensors .*layers.0.*lora_A"),
    ("half of them", without("lora_B"), r"lack 4 tensors .*lora_B"),
    ("one layer less", without("layers.1.mlp"), r"lack 2 tensors .*layers.1.mlp.down_proj.lora_A"),
    (
        "a module more",
        with_tensor("model.layers.0.self_attn.k_proj.lora_A.weight"),
        r"1 tensors .*no place.*k_proj.lora_A",
    ),
    (
        "a layer more",
        with_tensor("model.layers.7.self_attn.q_proj.lora_A.weight"),
        r"1 tensors .*no place.*layers.7",
    ),
    ("another tensor", with_tensor("extra.weight"), r"1 tensors .*no place.*extra.weight"),
    ("no biases", set_to(bias="all"), r"lack 8 tensors .*k_proj.bias"),
    ("another rank", set_to(r=3), r"size mismatch"),
    (
        "not numbers",
        lambda folder: keep(folder, lambda all_of: {n: t * torch.nan for n, t in all_of.items()}),
        r"NaN",
    ),
    ("modules that aren't there", set_to(target_modules=["wq"]), r"Target modules .*wq.* not found"),
]
SEEN_BY_CONFIG: list[tuple[str, Callable[[Path], None], str]] = [
    ("a broken pattern", set_to(target_modules="("), r"target_modules is '\(', which isn't a pattern"),
    ("no pattern", set_to(target_modules=5), r"target_modules is 5; .*list of modules"),
    (
        "a base changed by chance",
        set_to(init_lora_weights="pissa_niter_4"),
        r"is .pissa_niter_4., .*base model",
    ),
    (
        "a base changed by QR",
        set_to(init_lora_weights="olora"),
        r"init_lora_weights is 'olora', .*base model",
    ),
    ("a scale in words", set_to(lora_alpha="x"), r"lora_alpha is 'x'; .*above 0"),
    ("no scale", set_to(lora_alpha=float("nan")), r"lora_alpha is nan; .*above 0"),
    ("no bias", set_to(bias="some"), r"bias is 'some'; .*none, all, lora_only"),
    (
        "replicated layers",
        set_to(layer_replication=[[0, 2]]),
        r"sets layer_replication, .*can't be merged exactly.*with peft",
    ),
    ("activated LoRA", set_to(alora_invocation_tokens=[1]), r"sets alora_invocation_tokens"),
    ("a setting of tomorrow", set_to(new_scale=0.5), r"sets new_scale"),
    ("no kind", set_to(peft_type=None), r"peft_type is None, and only LoRA"),
    ("whole numbers", as_type(torch.int32), r"lora_A.weight \(I32\).*real numbers"),
    ("truth values", as_type(torch.bool), r"lora_A.weight \(BOOL\)"),
    ("complex numbers", as_type(torch.complex64), r"lora_A.weight \(C64\)"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    make_adapter(folder, lora(), attention_bias=True)
    return folder


@pytest.mark.parametrize(
    ("name", "break_it", "expected"), SEEN_BY_LOADING, ids=[name for name, *_ in SEEN_BY_LOADING]
)
def test_an_adapter_whose_tensors_do_not_fit_is_refused(
    name: str, break_it: Callable[[Path], None], expected: str, trained: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained / "adapter", tmp_path / "broken")
    break_it(folder)
    with pytest.raises(ModelError, match=rf"broken: can't be merged into its base model: (.|\n)*{expected}"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "break_it", "expected"), SEEN_BY_CONFIG, ids=[name for name, *_ in SEEN_BY_CONFIG]
)
def test_config_knows_which_adapters_are_not_merged(
    name: str, break_it: Callable[[Path], None], expected: str, trained: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained / "adapter", tmp_path / "broken")
    break_it(folder)
    with pytest.raises(ConfigError, match=expected):
        parse_config({"pretrain": str(folder), "custom_envs": {"Lake": {"env_type": "frozen_lake"}}})
    for load in (load_model, load_value_model):
        with pytest.raises(ModelError, match=expected):
            load(folder)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("PROMPT_TUNING", PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")),
        ("IA3", IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")),
    ],
)
def test_another_kind_of_adapter_is_refused_by_name(kind: str, settings: Any, tmp_path: Path) -> None:
    make_adapter(tmp_path, settings)
    with pytest.raises(ModelError, match=rf"peft_type is '{kind}', and only LoRA adapters.*merge_and_unload"):
        load_model(tmp_path / "adapter")


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_extended_vocabulary_is_refused_with_the_way_to_extend_the_base(
    is_tied: bool, tmp_path: Path
) -> None:
    make_adapter(tmp_path, lora(), num_rows=270, tie_word_embeddings=is_tied)
    with pytest.raises(
        ModelError, match=r"270 rows .* 260 in the base model.*resize_token_embeddings\(270\).*tokenizer"
    ):
        load_model(tmp_path / "adapter")
