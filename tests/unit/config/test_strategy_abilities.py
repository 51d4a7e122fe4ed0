"""A strategy that lacks what a role asks for is refused at the key that asks for it, with a strategy that
can."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from turnwise.config import parse_config
from turnwise.errors import ConfigError
from turnwise.spec import STRATEGIES

LAKE = "pretrain: nobody/model\ncustom_envs: {Lake: {env_type: frozen_lake}}\n"
STREAMED = """
async_generation_ratio: 1
stream_training: true
rollout_batch_size: 8
train_env_manager: {num_env_groups: 4, group_size: 2}
"""
CASES = {
    "lora": ("actor_train: {model_args: {lora_rank: 4}}", "actor_train.model_args.lora_rank"),
    "gradient_checkpointing": (
        "actor_train: {model_args: {disable_gradient_checkpointing: false}}",
        "actor_train.model_args.disable_gradient_checkpointing",
    ),
    "streamed_parts": (STREAMED, "stream_training"),
    "kept_ids": (
        "async_generation_ratio: 1\nactor_infer: {generating_args: {top_k: 20}}",
        "actor_infer.generating_args.top_k",
    ),
    "critic": ("adv_estimator: gae", "adv_estimator"),
    "fp16": ("actor_train: {model_args: {dtype: fp16}}", "actor_train.model_args.dtype"),
}


@pytest.mark.parametrize("ability", CASES)
def test_what_a_strategy_lacks_is_refused_where_it_is_asked_for(
    ability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, key = CASES[ability]
    parse_config(yaml.safe_load(LAKE + text))
    limited = replace(STRATEGIES["torch_train"], lacks={ability: "its engine has none"})
    monkeypatch.setitem(STRATEGIES, "torch_train", limited)
    parse_config(yaml.safe_load(LAKE))
    with pytest.raises(ConfigError) as raised:
        parse_config(yaml.safe_load(LAKE + text))
    for words in (key, "torch_train", "its engine has none"):
        assert words in str(raised.value)


def test_the_strategies_that_can_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_train", "megatron_train"):
        monkeypatch.setitem(
            STRATEGIES, name, replace(STRATEGIES[name], lacks={"lora": "its engine has none"})
        )
    with pytest.raises(ConfigError) as raised:
        parse_config(yaml.safe_load(LAKE + CASES["lora"][0]))
    assert "deepspeed_train" in str(raised.value) and "megatron_train" not in str(raised.value)


def test_a_run_streams_by_default_only_where_the_strategy_can(monkeypatch: pytest.MonkeyPatch) -> None:
    values = yaml.safe_load(LAKE + STREAMED)
    del values["stream_training"]
    assert parse_config(values)[0].stream_training
    limited = replace(STRATEGIES["torch_train"], lacks={"streamed_parts": "its engine has none"})
    monkeypatch.setitem(STRATEGIES, "torch_train", limited)
    assert not parse_config(values)[0].stream_training


def test_what_every_strategy_is_stands_in_its_spec() -> None:
    packing = {name for name, spec in STRATEGIES.items() if spec.always_packs}
    engines = ("torch", "fsdp2", "deepspeed", "megatron")
    assert packing == {f"{engine}_{kind}" for engine in engines for kind in ("train", "infer")}
    sharded = {name for name, spec in STRATEGIES.items() if spec.is_sharded}
    megatron = {"megatron_train", "megatron_infer"}
    assert sharded == {"fsdp2_train", "fsdp2_infer", "deepspeed_train", *megatron}
    everywhere = {name for name, spec in STRATEGIES.items() if spec.needs_all_processes}
    assert everywhere == megatron
    assert {name for name, spec in STRATEGIES.items() if spec.shares_all_devices} == {"deepspeed_train"}
    assert {name for name, spec in STRATEGIES.items() if spec.divides_layers} == megatron
    assert {name for name, spec in STRATEGIES.items() if spec.reads_trainer} == {"embedded", "hf"}
    assert {name for name, spec in STRATEGIES.items() if spec.limits_cache} == {"embedded"}
