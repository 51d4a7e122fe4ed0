"""Options of vLLM that contradict the model, or that the trainer can't follow, are refused at once."""

from __future__ import annotations

import json

import pytest
from small_configs import config_of

from turnwise.errors import ConfigError

SIZES = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def vllm(**options: object) -> dict[str, object]:
    return {"actor_infer.strategy_args": {"strategy_name": "vllm", "strategy_config": options}}


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, True), (3, False), (4, True), (8, False)])
def test_heads_are_divided_evenly(tmp_path, size, fits):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    devices = {"actor_infer.device_mapping": list(range(size))}
    keys = {"pretrain": str(tmp_path), "sequence_length": 64, **devices, **vllm(tp_size=size)}
    if fits:
        config_of(**keys)
        return
    with pytest.raises(ConfigError, match=rf"tp_size: {size} devices can't share 4 heads"):
        config_of(**keys)


def test_only_a_transfer_that_the_trainer_can_send_to_is_taken():
    config_of(**vllm(weight_transfer_config={"backend": "gloo"}))
    for transfer in ({"backend": "nccl"}, {}, "gloo"):
        with pytest.raises(ConfigError, match=r"weight_transfer_config: .*use \{backend: gloo\}"):
            config_of(**vllm(weight_transfer_config=transfer))
