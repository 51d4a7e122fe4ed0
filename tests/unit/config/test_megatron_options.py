"""`turnwise config` and the strategy refuse the same options of Megatron in the same words, and sizes that
the model can't be divided by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from turnwise.config import parse_config
from turnwise.config.place import place
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.show.sizes import shards
from turnwise.errors import ConfigError
from turnwise.runtime.machine import Machine, Node
from turnwise.runtime.rank import Layout
from turnwise.spec.megatron_options import MegatronOptions

DEVICES = [0, 1, 2, 3, 4, 5]
VALUES = f"""
pretrain: nobody/model
custom_envs: {{Lake: {{env_type: frozen_lake}}}}
rollout_batch_size: 96
use_kl_loss: true
num_gpus_per_node: 6
actor_train: {{device_mapping: {DEVICES}, strategy_args: {{strategy_name: megatron_train}}}}
reference: {{device_mapping: {DEVICES}, strategy_args: {{strategy_name: megatron_infer}}}}
"""
SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "intermediate_size": 96,
    "vocab_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 64,
}


def config(
    options: dict[str, Any], of_reference: dict[str, Any] | None = None, **changes: Any
) -> AgenticConfig:
    values = {**yaml.safe_load(VALUES), **changes}
    values["actor_train"]["strategy_args"]["strategy_config"] = options
    reference = options if of_reference is None else of_reference
    values["reference"]["strategy_args"]["strategy_config"] = reference
    return parse_config(values, AgenticConfig)[0]


REFUSED = [
    ({"tensor_model_paralel_size": 2}, "tensor_model_parallel_size"),
    ({"num_layers": 2}, "config.json"),
    ({"tp_size": 0}, "at least 1"),
    ({"tensor_model_parallel_size": "2"}, "at least 1"),
    ({"pipeline_model_parallel_size": 2, "pp_size": 3}, "differ"),
    ({"virtual_pipeline_model_parallel_size": 2}, "at least 3 pipeline stages"),
    ({"sequence_parallel": True}, "tensor_model_parallel_size is 1"),
    ({"sequence_parallel": 1}, "true or false"),
    ({"use_distributed_optimizer": "yes"}, "true or false"),
    ({"recompute_granularity": "half"}, "selective"),
    ({"expert_model_parallel_size": 2}, "experts"),
    ({"context_parallel_size": 0}, "at least 1"),
    ({"context_parallel_size": 2, "cp_size": 3}, "differ"),
    ({"microbatch_group_size_per_vp_stage": 0}, "at least 1"),
    ({"microbatch_group_size_per_vp_stage": 2}, "interleaved"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_config_and_strategy_refuse_in_the_same_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as by_strategy:
        MegatronOptions.of(options, 6)
    with pytest.raises(ConfigError) as by_config:
        config(options)
    key, _, sentence = str(by_strategy.value).partition(": ")
    assert words in sentence
    assert f"actor_train.{key}" in str(by_config.value) and sentence in str(by_config.value)


def test_what_megatron_knows_is_accepted() -> None:
    options = {"tp_size": 2, "pipeline_model_parallel_size": 3, "expert_model_parallel_size": 1}
    options |= {"virtual_pipeline_model_parallel_size": 2, "sequence_parallel": True}
    options |= {"recompute_granularity": "full", "bias_activation_fusion": True}
    config(options)
    parsed = MegatronOptions.of(options, 6)
    assert parsed.sizes == (2, 3, 2, 1) and parsed.passed == {"bias_activation_fusion": True}
    assert parsed.use_distributed_optimizer and parsed.recomputes


def test_names_of_other_engines_are_the_same_sizes() -> None:
    for names in (("tp_size", "pp_size"), ("tensor_parallel_size", "pipeline_parallel_size")):
        options = dict(zip(names, (2, 3), strict=True))
        assert MegatronOptions.of(options, 6).sizes == (2, 3, None, 1)
        assert config(options).actor_train.data_parallel_size == 1
    assert MegatronOptions.of({"tp_size": 2, "tensor_model_parallel_size": 2}, 2).tp == 2


@pytest.mark.parametrize(
    ("sizes", "dp"),
    [
        ({"tp_size": 2}, 3),
        ({"pp_size": 3}, 2),
        ({}, 6),
        ({"cp_size": 3}, 2),
        ({"tp_size": 2, "cp_size": 3}, 1),
    ],
)
def test_samples_are_divided_among_copies_of_the_model(sizes: dict[str, Any], dp: int) -> None:
    divided = config(sizes)
    assert divided.actor_train.data_parallel_size == dp
    layout = place(divided, Machine((Node(6),))).roles["actor_train"].layout
    names = ("tp_size", "pp_size", "cp_size")
    assert layout == Layout(dp, *(sizes.get(name, 1) for name in names))


def test_ranks_that_share_tokens_hold_the_same_weights() -> None:
    role = config({"tp_size": 2, "cp_size": 3}).actor_train
    assert shards(role, 6) == 2


@pytest.mark.parametrize("by", [lambda o: MegatronOptions.of(o, 6), config])
@pytest.mark.parametrize("sizes", [{"tensor_model_parallel_size": 4}, {"pp_size": 3, "cp_size": 4}])
def test_ranks_hold_whole_copies(by: Any, sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"whole copies|copies of the model"):
        by(sizes)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, {"tp_size": 2}, "5 attention heads"),
        ({"num_key_value_heads": 3}, {"tp_size": 2}, "3 key-value heads"),
        ({"num_hidden_layers": 4}, {"pp_size": 3}, "4 layers"),
        ({}, {"pp_size": 3, "virtual_pipeline_model_parallel_size": 4}, "of 4 parts"),
        ({"model_type": "gemma"}, {}, "those with one are llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen3_moe"}, {}, "mixture of experts"),
    ],
)
def test_sizes_divide_the_model(
    shape: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **shape}))
    with pytest.raises(ConfigError, match=words):
        config(options, pretrain=str(tmp_path))


def test_all_roles_have_the_same_sizes() -> None:
    with pytest.raises(ConfigError, match="tensor 1 × pipeline 3"):
        config({"tp_size": 2}, of_reference={"pp_size": 3})


def test_adapters_are_refused_with_the_strategies_that_can() -> None:
    values = yaml.safe_load(VALUES)["actor_train"]
    with pytest.raises(ConfigError, match="fsdp2_train"):
        config({}, actor_train={**values, "model_args": {"lora_rank": 8}})


def test_a_norm_among_the_options_is_that_of_the_run() -> None:
    config({"max_grad_norm": 1.0}, max_grad_norm=1.0)
    with pytest.raises(ConfigError, match=r"2\.0 isn't the run's max_grad_norm 1\.0"):
        config({"max_grad_norm": 2.0}, max_grad_norm=1.0)
