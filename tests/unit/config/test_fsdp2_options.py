"""`turnwise config` and the strategy refuse the same options of FSDP2 in the same words."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from turnwise.config import parse_config
from turnwise.errors import ConfigError
from turnwise.spec.fsdp2_options import Fsdp2Options

LAKE = "pretrain: nobody/model\ncustom_envs: {Lake: {env_type: frozen_lake}}\nrollout_batch_size: 96"


def config(options: dict[str, Any], role: str = "actor_train", **model: Any) -> Any:
    kind = "infer" if role == "reference" else "train"
    values = yaml.safe_load(LAKE)
    values["use_kl_loss"] = True
    values["actor_train"] = {"device_mapping": [0, 1, 2, 3, 4, 5]}
    values[role] = {
        "device_mapping": [0, 1, 2, 3, 4, 5],
        "model_args": model,
        "strategy_args": {"strategy_name": f"fsdp2_{kind}", "strategy_config": options},
    }
    return parse_config(values)[0]


REFUSED = [
    ({"reshard_after_foward": True}, "reshard_after_forward"),
    ({"tp_size": 2}, "no such option"),
    ({"wrap_policy": {}}, "each decoder layer"),
    ({"reshard_after_forward": "yes"}, "number of ranks"),
    ({"param_dtype": "fp8"}, "bfloat16"),
    ({"reduce_dtype": "fp16"}, "model_args.dtype"),
    ({"param_dtype": ["bf16"]}, "bfloat16"),
    ({"offload_policy": "cpu"}, "CPUOffloadPolicy"),
    ({"fsdp_size": 4}, "divisor of 6"),
    ({"fsdp_size": 0}, "at least 1"),
    ({"sync_gradients": "never"}, "each and last"),
]


@pytest.mark.parametrize("role", ["actor_train", "reference"])
@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_config_and_strategy_refuse_in_the_same_words(options: dict[str, Any], words: str, role: str) -> None:
    with pytest.raises(ConfigError) as by_strategy:
        Fsdp2Options.of(options, 6, "float32")
    with pytest.raises(ConfigError) as by_config:
        config(options, role)
    [name] = options
    sentence = str(by_strategy.value).partition(f"strategy_config.{name}: ")[2]
    assert words in sentence
    assert f"{role}.strategy_args.strategy_config.{name}" in str(by_config.value)
    assert sentence in str(by_config.value)


def test_what_torch_knows_is_accepted() -> None:
    options = {
        "reshard_after_forward": 2,
        "param_dtype": "bf16",
        "reduce_dtype": "float32",
        "offload_policy": True,
        "fsdp_size": 3,
        "sync_gradients": "last",
    }
    config(options)
    made = Fsdp2Options.of(options, 6, "float32")
    assert (made.param_dtype, made.reduce_dtype, made.fsdp_size) == ("bfloat16", "float32", 3)
    config({"param_dtype": "fp16"}, dtype="fp16")


def test_a_role_may_be_on_some_of_the_processes() -> None:
    values = yaml.safe_load(LAKE)
    values["adv_estimator"] = "gae"
    values["actor_train"] = {"device_mapping": [0, 1, 2, 3]}
    values["critic"] = {"device_mapping": [0, 1], "strategy_args": {"strategy_name": "fsdp2_train"}}
    parse_config(values)
    values["critic"]["strategy_args"] = {"strategy_name": "deepspeed_train"}
    parse_config(values)
    values["actor_train"]["strategy_args"] = {"strategy_name": "deepspeed_train"}
    with pytest.raises(ConfigError, match="critic is on 2 of the 4 of critic and actor_train"):
        parse_config(values)
    values["critic"]["strategy_args"] = {"strategy_name": "megatron_train"}
    with pytest.raises(ConfigError, match="shards over all"):
        parse_config(values)
