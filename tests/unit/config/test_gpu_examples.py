"""The examples for several GPUs and for one: where their roles run, and how much memory one GPU needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from turnwise.config import describe, load_any_config, load_config
from turnwise.config.place import place, smallest_machine
from turnwise.errors import ConfigError
from turnwise.models.presets import preset
from turnwise.runtime.machine import Machine, Node
from turnwise.spec import STRATEGIES

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
ONE_GPU = sorted(EXAMPLES.rglob("*one_gpu.yaml"))
EIGHT_GPUS = sorted(set((EXAMPLES / "qwen2.5-0.5B-agentic").glob("*.yaml")) - set(ONE_GPU))
PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load(
    (ROOT / "tests" / "data" / "published_configs.yaml").read_text(encoding="utf-8")
)
SHARDED = {
    name
    for name, values in PUBLISHED.items()
    if values.get("actor_train", {}).get("strategy_args", {}).get("strategy_name", "torch_train")
    in {strategy for strategy, spec in STRATEGIES.items() if spec.is_sharded}
}
MOST_GB = 24.0


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A folder with the shape of Qwen2.5-0.5B, without its weights."""
    made = preset("qwen2.5-0.5b")
    values = {"model_type": made.model_type, "vocab_size": made.vocab_size, **made.config}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def gigabytes(text: str) -> float:
    """The sum of all amounts in a text."""
    amounts = re.findall(r"([\d.]+) (MB|GB)", text)
    return sum(float(number) / (1000 if unit == "MB" else 1) for number, unit in amounts)


@pytest.mark.parametrize("path", ONE_GPU, ids=lambda path: path.name)
def test_one_gpu_suffices(path: Path, qwen: Path) -> None:
    config, _ = load_config(path, [f"pretrain={qwen}"])
    placement = place(config, Machine((Node(1, "cuda"),)))
    assert placement.devices == (0,) and placement.num_servers == 1
    [estimate] = [text for name, text in describe(config, placement).rows if name == "memory"]
    assert 2 < gigabytes(estimate) <= MOST_GB, estimate


@pytest.mark.parametrize("path", EIGHT_GPUS, ids=lambda path: path.name)
def test_eight_gpus_are_named(path: Path) -> None:
    config, _ = load_config(path, [])
    assert config.num_gpus_per_node == 8
    for machine in (smallest_machine(config), Machine((Node(8, "cuda"),)), Machine((Node(2),))):
        assert place(config, machine).devices == tuple(range(8))


def test_each_engine_that_shards_is_shown() -> None:
    shown = {load_config(path, [])[0].actor_train.strategy_args.strategy_name for path in EIGHT_GPUS}
    assert shown == {"megatron_train", "fsdp2_train", "deepspeed_train"}


@pytest.mark.parametrize("name", sorted(SHARDED))
def test_published_files_of_sharded_models_have_a_place(name: str, tmp_path: Path) -> None:
    """Files that can be used have a place on the devices and nodes that they name."""
    path = tmp_path / "published.yaml"
    path.write_text(json.dumps(PUBLISHED[name]).replace("${", "\\\\${"), encoding="utf-8")
    try:
        config, _ = load_any_config(path)
    except ConfigError:
        return  # `test_published_files` knows why
    placement = place(config, smallest_machine(config))
    assert len(placement.roles["actor_train"].ranks) == len(config.actor_train.device_mapping)
