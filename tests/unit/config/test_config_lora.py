"""What a config says of LoRA and of partial training before a model is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from messages import mentions, says
from safetensors.torch import save_file
from small_configs import SFT, config_of, values_of
from toy_model import toy_model

from turnwise.config import SFTConfig, describe, differences, ineffective, parse_config, unavailable
from turnwise.config.checks import missing
from turnwise.config.schema.model_shape import read_model_shape
from turnwise.errors import ConfigError
from turnwise.models.lora import Adapters, LoRASettings


def with_lora(role: str = "actor_train", **model_args: Any) -> dict[str, Any]:
    return {role: {"model_args": {"lora_rank": 8, **model_args}}}


def test_lora_and_frozen_parameters_can_be_trained() -> None:
    assert unavailable(config_of(**with_lora(lora_target="all", lora_dropout=0.1))) == []
    assert (
        unavailable(config_of(actor_train={"model_args": {"freeze_module_prefix": "model.layers.0."}})) == []
    )
    assert unavailable(parse_config(SFT | {"model_args": {"lora_rank": 4}}, SFTConfig)[0]) == []
    assert ineffective(config_of(**with_lora(lora_alpha=4.0))) == []


@pytest.mark.parametrize("target", ["all-linear", ["all-linear"]], ids=str)
def test_all_linear_is_all(target: str | list[str]) -> None:
    assert config_of(**with_lora(lora_target=target)).actor_train.model_args.lora_target == ["all"]
    sft = parse_config(SFT | {"model_args": {"lora_rank": 4, "lora_target": target}}, SFTConfig)[0]
    assert sft.model_args.lora_target == ["all"]
    with pytest.raises(ConfigError, match=says("lora_target", "all", "alone")):
        config_of(**with_lora(lora_target=["all-linear", "q_proj"]))


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "find_spec", lambda name: None if name == "peft" else object())
    for config, key in (
        (config_of(**with_lora()), "actor_train.model_args.lora_rank"),
        (parse_config(SFT | {"model_args": {"lora_rank": 4}}, SFTConfig)[0], "model_args.lora_rank"),
    ):
        [line] = unavailable(config)
        assert line.startswith(f"{key}: ") and mentions(line, "peft", "pip install -e '.[rl]'")
    assert unavailable(config_of()) == []


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        (
            {"actor_train.model_args.lora_target": "all"},
            says("actor_train.model_args.lora_target", "lora_rank"),
        ),
        (
            with_lora("actor_infer"),
            says("actor_infer.model_args.lora_rank", "actor_train"),
        ),
        (
            {"reference.model_args.lora_rank": 8, "use_kl_loss": True},
            says("reference.model_args.lora_rank", "trained"),
        ),
        (
            {"actor_infer.model_args.freeze_module_prefix": "x"},
            says("actor_infer.model_args.freeze_module_prefix", "actor_train"),
        ),
    ],
)
def test_a_key_without_effect_is_answered(keys: dict[str, Any], pattern: str) -> None:
    [line] = ineffective(config_of(**keys))
    assert re.match(pattern, line)
    said = " ".join(text for _, text in describe(config_of(**keys)).rows)
    assert "LoRA" not in said and "frozen: " not in said, "the table tells what has an effect"


@pytest.mark.parametrize(
    ("model_args", "message"),
    [
        ({"lora_target": []}, says("lora_target", "[]", "linear modules")),
        ({"lora_target": ["all", "q_proj"]}, says("lora_target", "all", "alone")),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"lora_rank": 0}, "lora_rank"),
    ],
)
def test_what_cannot_be_is_refused(model_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**with_lora(**model_args))
    with pytest.raises(ConfigError, match=f"critic.*{message}"):
        config_of(adv_estimator="gae", **with_lora("critic", **model_args))
    with pytest.raises(ConfigError, match=message):
        parse_config(SFT | {"model_args": {"lora_rank": 8, **model_args}}, SFTConfig)


def test_the_reference_is_in_the_policy_where_it_is_the_same_model_computed_alike() -> None:
    assert config_of(**with_lora()).is_reference_in_policy
    assert config_of(**with_lora(dtype="bf16")).is_reference_in_policy, "its dtype follows the policy's"
    assert not config_of().is_reference_in_policy
    for other in ({"model_name_or_path": "models/other"}, {"dtype": "bf16"}, {"attn_implementation": "sdpa"}):
        assert not config_of(**with_lora(), reference={"model_args": other}).is_reference_in_policy


@pytest.fixture
def toy_folder(tmp_path: Path) -> Path:
    toy_model().config.save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


@pytest.mark.parametrize("targets", [["all"], ["q_proj", "mlp.down_proj"]])
def test_parameters_of_adapters_are_counted_as_the_model_has_them(
    toy_folder: Path, targets: list[str]
) -> None:
    shape = read_model_shape(str(toy_folder))
    adapters = Adapters(toy_model(), LoRASettings(4, 8, targets=tuple(targets)))
    assert shape is not None
    assert shape.num_lora_parameters(4, targets) == sum(
        p.numel() for p in adapters.model.parameters() if p.requires_grad
    )


def test_memory_of_lora_is_the_frozen_model_its_adapters_and_the_engine_s_copy(toy_folder: Path) -> None:
    def memory(**keys: Any) -> str:
        return dict(describe(config_of(pretrain=str(toy_folder), sequence_length=64, **keys)).rows)["memory"]

    said = memory(use_kl_loss=True, **with_lora())
    assert "frozen weights" in said and "adapters" in said and "sampler" in said and "reference" not in said
    assert "reference" in memory(use_kl_loss=True) and "sampler" not in memory(use_kl_loss=True)
    critics = [
        re.findall(r"[0-9.]+ MB critic", memory(adv_estimator="gae", **keys))
        for keys in ({}, with_lora("critic"))
    ]
    assert critics[0] and critics[1] and critics[0] != critics[1]
    assert memory(actor_train={"model_args": {"freeze_module_prefix": "model.embed_tokens"}}).startswith(
        "at most"
    )
    sft = parse_config(
        SFT | {"pretrain": str(toy_folder), "model_args": {"lora_rank": 2}, "sequence_length": 64}, SFTConfig
    )[0]
    assert "frozen weights" in dict(describe(sft).rows)["memory"]


def test_an_adapter_folder_has_the_size_of_its_base(toy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    content = {"peft_type": "LORA", "base_model_name_or_path": str(toy_folder)}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(content))
    save_file({}, tmp_path / "adapter" / "adapter_model.safetensors")
    assert read_model_shape(str(tmp_path / "adapter")) == read_model_shape(str(toy_folder))
    config = config_of(pretrain=str(tmp_path / "adapter"))
    assert config.sequence_length == 256
    assert mentions(dict(describe(config).rows)["model"], "adapter", str(toy_folder))


def test_a_run_cannot_go_on_with_other_adapters() -> None:
    for key in (
        "actor_train.model_args.lora_rank",
        "model_args.lora_target",
        "critic.model_args.freeze_module_prefix",
    ):
        [difference] = differences({}, values_of({}, **{key: 2}))
        assert difference.is_refused and mentions(str(difference), key, "unset → 2", "checkpoint")
    [difference] = differences({}, {"actor_train": {"model_args": {"lora_dropout": 0.1}}})
    assert not difference.is_refused


def test_null_is_unset_for_lora_alpha() -> None:
    arguments = config_of(**with_lora(lora_alpha=None)).actor_train.model_args
    assert arguments.lora_alpha == 16.0, "without alpha no adapters are made"
