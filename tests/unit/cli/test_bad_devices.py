"""`turnwise config` refuses what can't be divided among devices, what an engine can't do, and training on
devices of inference that can't be lent, each with its own sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import mentions

from turnwise.assemble import prepare
from turnwise.cli.main import main
from turnwise.config import load_config
from turnwise.runtime.machine import Machine, Node

Refused = Callable[..., str]

SHAPE = {
    "model_type": "qwen2",
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "intermediate_size": 96,
    "vocab_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
}
SIZE = "actor_train.strategy_args.strategy_config"


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config of twelve devices, all of which train and sample, for a model of the given shape."""

    def write(shape: dict[str, Any] | None = None, **values: Any) -> Path:
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPE | (shape or {})))
        path = tmp_path / "main.yaml"
        content: dict[str, Any] = {
            "pretrain": str(model),
            "sequence_length": 256,
            "rollout_batch_size": 96,
            "num_gpus_per_node": 12,
            "custom_envs": {"Lake": {"env_type": "frozen_lake"}},
            "actor_train": {"device_mapping": "list(range(0,12))"},
        }
        path.write_text(json.dumps(content | values))
        return path

    return write


@pytest.fixture
def refused(config_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Refused:
    """What `turnwise config` says against a config, with which it ends."""

    def run(*overrides: str, shape: dict[str, Any] | None = None, **values: Any) -> str:
        assert main(["config", str(config_file(shape, **values)), *overrides]) == 2
        return capsys.readouterr().err

    return run


def megatron(**options: Any) -> list[str]:
    changes = ["actor_train.strategy_args.strategy_name=megatron_train"]
    return changes + [f"++{SIZE}.{name}={value}" for name, value in options.items()]


@pytest.mark.parametrize(
    ("options", "shape", "parts"),
    [
        ({"tp_size": 4}, {}, ["tensor_model_parallel_size", "6 attention heads", "4"]),
        ({"tp_size": 6}, {"num_key_value_heads": 3}, ["tensor_model_parallel_size", "3 key-value heads"]),
        ({"pp_size": 4}, {}, ["pipeline_model_parallel_size", "6 layers", "4 pipeline stages"]),
        ({"tp_size": 3, "pp_size": 3}, {}, ["device_mapping", "12", "9"]),
        (
            {"pp_size": 3, "virtual_pipeline_model_parallel_size": 4},
            {},
            ["virtual_pipeline_model_parallel_size", "6 layers", "of 4 parts"],
        ),
        (
            {"pp_size": 2, "virtual_pipeline_model_parallel_size": 3},
            {},
            ["virtual_pipeline_model_parallel_size", "3 pipeline stages"],
        ),
        (
            {
                "pp_size": 3,
                "virtual_pipeline_model_parallel_size": 2,
                "microbatch_group_size_per_vp_stage": 2,
            },
            {},
            ["microbatch_group_size_per_vp_stage", "at least", "3"],
        ),
        ({"sequence_parallel": "true"}, {}, ["sequence_parallel", "tensor_model_parallel_size is 1"]),
        ({"context_parallel_size": 0}, {}, ["context_parallel_size", "at least 1"]),
        (
            {"context_parallel_size": 2, "tp_size": 3, "pp_size": 3},
            {},
            ["device_mapping", "12 devices", "18"],
        ),
        ({"expert_model_parallel_size": 2}, {}, ["expert_model_parallel_size", "experts"]),
        ({"tp_sise": 2}, {}, ["tp_sise", "tp_size"]),
        ({}, {"model_type": "gemma"}, ["strategy_name", "gemma", "llama, mistral, qwen2, qwen3"]),
        ({}, {"model_type": "qwen3_moe"}, ["strategy_name", "mixture of experts", "fsdp2_train"]),
    ],
)
def test_what_megatron_cannot_divide(
    options: dict[str, Any], shape: dict[str, Any], parts: list[str], refused: Refused
) -> None:
    assert mentions(refused(*megatron(**options), shape=shape), *parts)


def test_a_copy_of_the_model_needs_more_devices_than_the_run_has(
    config_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher may start as many, so the config is valid."""
    changes = [*megatron(tp_size=3), "actor_train.device_mapping=null", "num_gpus_per_node=1"]
    path = config_file()
    assert main(["config", str(path), *changes]) == 0
    assert mentions(capsys.readouterr().out, TRAIN, "1 device", "needs 3")
    config, _ = load_config(path, [*changes, "num_gpus_per_node=3"])
    launched = Machine((Node(3),), num_launched=3)
    assert [*prepare.lacking_devices(config, launched)] == []


def test_adapters_with_megatron_name_the_strategies_that_train_them(refused: Refused) -> None:
    said = refused(*megatron(), "actor_train.model_args.lora_rank=4")
    assert mentions(said, "actor_train.model_args.lora_rank", "megatron_train", "fsdp2_train")


def test_megatron_on_a_gpu_without_kernels(config_file: Callable[..., Path]) -> None:
    """`config` says so where the GPUs are, and `train` refuses."""
    config, _ = load_config(config_file(), megatron())
    lacking = [*prepare.lacking_kernels(config, Machine((Node(12, "cuda"),)))]
    assert mentions(lacking, "actor_train.strategy_args.strategy_name", "TransformerEngine", "fsdp2_train")
    assert not [*prepare.lacking_kernels(config, Machine((Node(12),)))]


def test_samples_that_are_shared_among_ranks_need_gpus(config_file: Callable[..., Path]) -> None:
    config, _ = load_config(config_file(), megatron(context_parallel_size=2))
    lacking = [*prepare.lacking_kernels(config, Machine((Node(12),)))]
    assert mentions(lacking, f"{SIZE}.context_parallel_size", "got 2", "no GPU", "use 1")
    assert not mentions([*prepare.lacking_kernels(config, Machine((Node(12, "cuda"),)))], "no GPU")


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("reshard_after_foward=true", ["fully_shard", "reshard_after_forward"]),
        ("ignored_params=[]", ["ignored_params", "fully_shard"]),
        ("fsdp_size=5", ["fsdp_size", "12 ranks", "divisor of 12"]),
        ("reduce_dtype=fp16", ["reduce_dtype", "model_args.dtype"]),
    ],
)
def test_what_fully_shard_does_not_have(option: str, parts: list[str], refused: Refused) -> None:
    name = "actor_train.strategy_args.strategy_name=fsdp2_train"
    assert mentions(refused(name, f"++{SIZE}.{option}"), *parts)


TRAIN, INFER = "actor_train.device_mapping", "actor_infer.device_mapping"
TWO = [
    "actor_infer.strategy_args.strategy_name=vllm",
    "++actor_infer.strategy_args.strategy_config.tp_size=2",
]


@pytest.mark.parametrize(
    ("trained", "served", "changes", "parts"),
    [
        ("[0]", "[0,1]", ["async_generation_ratio=1", *TWO], [INFER, "one replica", "at least 2 replicas"]),
        ("[0,2]", "[0,1,2,3]", ["async_generation_ratio=1", *TWO], [INFER, "2 replicas", "none"]),
        ("[0,1]", "[0,1]", ["async_generation_ratio=1"], [TRAIN, "all", "no replica"]),
        ("[0,1]", "[0,1,2]", [], [TRAIN, "asynchronous", "async_generation_ratio"]),
    ],
)
def test_devices_that_cannot_be_lent(
    trained: str, served: str, changes: list[str], parts: list[str], refused: Refused
) -> None:
    said = refused(f"{TRAIN}={trained}", f"{INFER}={served}", *changes)
    assert mentions(said, *parts)


@pytest.mark.parametrize(
    ("trained", "served", "changes"),
    [
        ("[0,1]", "[0,1,2]", ["async_generation_ratio=1"]),
        ("[0,1]", "[0,1,2,3]", ["async_generation_ratio=1", *TWO]),
        ("[0,1]", "[2,3]", ["async_generation_ratio=1"]),
        ("[0,1]", "[0,1]", []),
        ("[0,1]", "[0]", []),
    ],
)
def test_devices_that_can(
    trained: str, served: str, changes: list[str], config_file: Callable[..., Path]
) -> None:
    assert main(["config", str(config_file()), f"{TRAIN}={trained}", f"{INFER}={served}", *changes]) == 0


def test_what_lacks_a_strategy_names_one_that_can(
    config_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`deepspeed_infer` is known, and missing."""
    changes = ["use_kl_loss=true", "reference.strategy_args.strategy_name=deepspeed_infer"]
    assert main(["config", str(config_file()), *changes]) == 0
    assert mentions(capsys.readouterr().out, "reference.strategy_args.strategy_name", "fsdp2_infer")
