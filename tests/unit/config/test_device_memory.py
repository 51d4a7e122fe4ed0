"""What each device holds is computed from the model's config.json, as the roles are placed."""

from __future__ import annotations

import json
import re

import pytest
from small_configs import SFT, config_of, values_of

from turnwise.config import SFTConfig, parse_config
from turnwise.config.place import place, smallest_machine
from turnwise.config.show.device_memory import device_memory
from turnwise.runtime.machine import Machine, Node

SIZES = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
NUM_PARAMETERS = 64_000 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 32 + 3 * 64 * 128 + 128) + 64
TRAIN, INFER = "actor_train.device_mapping", "actor_infer.device_mapping"
FSDP2 = {"actor_train.strategy_args": {"strategy_name": "fsdp2_train"}}


def vllm(size: int) -> dict[str, object]:
    options = {"strategy_name": "vllm", "strategy_config": {"tp_size": size}}
    return {"actor_infer.strategy_args": options}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return str(tmp_path)


def megabytes(text: str) -> dict[int, float]:
    """Device → MB."""
    found = re.findall(r"^device (\d+): ([0-9.]+) MB", text, re.M)
    return {int(device): float(number) for device, number in found}


def held(folder: str, **keys: object) -> str:
    config = config_of(pretrain=folder, sequence_length=64, **keys)
    return device_memory(config, place(config, smallest_machine(config)))


def test_a_trained_model_is_on_each_rank_or_divided_among_them(folder):
    trained = 16 * NUM_PARAMETERS / 1e6
    copies = held(folder, **{TRAIN: [0, 1], INFER: [2]})
    assert megabytes(copies)[0] == megabytes(copies)[1] == pytest.approx(trained, abs=0.06)
    shards = held(folder, **{TRAIN: [0, 1], INFER: [2]}, **FSDP2)
    assert megabytes(shards)[0] == megabytes(shards)[1] == pytest.approx(trained / 2, abs=0.06)
    assert f"{NUM_PARAMETERS:,} trained parameters × 16 bytes" in shards and "/ 2 ranks" in shards


def test_a_replica_is_divided_among_its_devices(folder):
    whole = megabytes(held(folder, **{TRAIN: [0], INFER: [1], "cluster.name": "process"}, **vllm(1)))
    half = megabytes(held(folder, **{TRAIN: [0], INFER: [1, 2]}, **vllm(2)))
    assert half[1] == half[2] == pytest.approx(whole[1] / 2, abs=0.06)


def test_it_says_what_is_there_when(folder):
    assert "take turns" in held(folder)
    assert "at the same time" in held(folder, async_generation_ratio=1, **{INFER: [0]})
    assert "devices of their own" in held(folder, **{TRAIN: [0], INFER: [1, 2]})


def test_fine_tuning_has_one_line_and_a_model_without_sizes_none(folder):
    config = parse_config(values_of(SFT, pretrain=folder, sequence_length=64), SFTConfig)[0]
    assert list(megabytes(device_memory(config, place(config, smallest_machine(config))))) == [0]
    assert held("models/none") == ""


@pytest.mark.parametrize(
    ("backend", "served", "holding"), [("gloo", [2], []), ("nccl", [2], [0]), ("ipc", [0, 1], [0, 1])]
)
def test_a_rank_that_hands_weights_to_an_engine_holds_a_copy_of_them(folder, backend, served, holding):
    options = {"weight_transfer_config": {"backend": backend}}
    strategy = {"strategy_name": "vllm", "strategy_config": options}
    keys = {"cluster.name": "process", "actor_infer.strategy_args": strategy, TRAIN: [0, 1], INFER: served}
    config = config_of(pretrain=folder, sequence_length=64, **keys)
    text = device_memory(config, place(config, Machine((Node(3, "cuda"),))))
    lines = [line for line in text.splitlines() if line.startswith("device") and "engines" in line]
    assert [int(line.split()[1][:-1]) for line in lines] == holding
