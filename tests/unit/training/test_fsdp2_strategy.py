"""FSDP2 on one rank: what is loaded from folders, in which dtypes it computes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from strategy_contract import OUTPUTS, VALUES, WeightedLoss, metric, weights_of
from toy_model import toy_batches, toy_model, toy_samples, toy_value_model

from turnwise.errors import ConfigError
from turnwise.models.load import load_tokenizer, save_model
from turnwise.models.lora import LoRASettings
from turnwise.models.make import make_model
from turnwise.runtime.rank import RankContext
from turnwise.training.fsdp2_strategy import Fsdp2Strategy
from turnwise.training.model_source import ModelSource, NewAdapters
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import FROZEN, StrategySettings
from turnwise.training.torch_strategy import TorchStrategy

SETTINGS = StrategySettings(OptimizerSettings(1e-3, eps=1e-4))
POLICIES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "llama": {"model_type": "llama"},
}


@pytest.fixture(autouse=True)
def leave_groups() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def save(folder: Path, is_value: bool = False, **config: Any) -> str:
    model = toy_value_model(**config) if is_value else toy_model(**config)
    save_model(model, None, folder)
    return str(folder)


def assert_like_torch(source: ModelSource, folder: Path) -> None:
    """The same weights and files, and a checkpoint of either goes on in the other."""
    outputs = VALUES if source.has_value_head else OUTPUTS
    loss, batches = WeightedLoss(outputs=outputs), toy_batches(toy_samples(5), [[0, 3], [1, 2, 4]])
    plain = TorchStrategy.for_role(source, RankContext(), {}, SETTINGS)
    sharded = Fsdp2Strategy.for_role(source, RankContext(), {}, SETTINGS)
    for name, tensor in weights_of(plain).items():
        assert torch.equal(weights_of(sharded)[name], tensor), name
    norms = [metric(strategy.train_step(batches, loss), "grad_norm") for strategy in (plain, sharded)]
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-5)
    for name, strategy in (("plain", plain), ("sharded", sharded)):
        strategy.save(folder / name, "model")
        strategy.save(folder / f"{name}_state")
    files = [sorted(path.name for path in (folder / name).iterdir()) for name in ("plain", "sharded")]
    assert files[0] == files[1]
    for file in files[0]:
        if file.endswith((".json", ".txt")):
            assert (folder / "plain" / file).read_bytes() == (folder / "sharded" / file).read_bytes()
    again = Fsdp2Strategy.for_role(source, RankContext(), {}, SETTINGS)
    again.load(folder / "plain_state")
    plain.load(folder / "sharded_state")
    for strategy in (plain, again):
        strategy.train_step(batches, loss, position=1.0)
    for name, tensor in weights_of(plain).items():
        np.testing.assert_allclose(weights_of(again)[name], tensor, atol=1e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_read_by_slices(name: str, tmp_path: Path) -> None:
    source = ModelSource(save(tmp_path / "model", **POLICIES[name]))
    assert source.load_slices() is not None
    assert_like_torch(source, tmp_path)


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("is_adapted", [True, False])
def test_a_value_model_is_read_by_slices(has_head: bool, is_adapted: bool, tmp_path: Path) -> None:
    """A language model's head is left out, and a value head of zeros is put in its place."""
    adapters = None
    if is_adapted:
        adapters = NewAdapters(LoRASettings(rank=4, alpha=8, seed=1), tmp_path / "merged", None)
    path = save(tmp_path / "model", is_value=has_head)
    source = ModelSource(path, has_value_head=True, adapters=adapters)
    assert source.load_slices() is not None
    assert_like_torch(source, tmp_path)


def test_adapters_are_put_beside_slices(tmp_path: Path) -> None:
    adapters = NewAdapters(LoRASettings(rank=4, alpha=8, seed=1), tmp_path / "merged", None)
    source = ModelSource(save(tmp_path / "model"), adapters=adapters)
    assert_like_torch(source, tmp_path)


def test_a_folder_of_adapters_is_loaded_whole(tmp_path: Path) -> None:
    make_model("tiny", tmp_path / "base", ["0 1 2 3"])
    tokenizer = load_tokenizer(tmp_path / "base")
    adapters = NewAdapters(LoRASettings(rank=4, alpha=8, seed=1), tmp_path / "merged", tokenizer)
    source = ModelSource(str(tmp_path / "base"), adapters=adapters)
    TorchStrategy.for_role(source, RankContext(), {}, SETTINGS).save(tmp_path / "adapted")
    adapted = ModelSource(str(tmp_path / "adapted"))
    assert adapted.load_slices() is None
    plain = TorchStrategy.for_role(adapted, RankContext(), {}, SETTINGS)
    sharded = Fsdp2Strategy.for_role(adapted, RankContext(), {}, SETTINGS)
    for name, tensor in weights_of(plain).items():
        assert torch.equal(weights_of(sharded)[name], tensor), name


def test_a_frozen_model_gives_the_log_probs_of_torch(tmp_path: Path) -> None:
    source = ModelSource(save(tmp_path / "model"))
    batches = toy_batches(toy_samples(5), [[0, 3], [1, 2, 4]])
    plain, sharded = (
        strategy.for_role(source, RankContext(), {}, FROZEN).forward(batches, OUTPUTS)
        for strategy in (TorchStrategy, Fsdp2Strategy)
    )
    for expected, got in zip(plain, sharded, strict=True):
        for name, array in expected.items():
            np.testing.assert_allclose(got[name], array, atol=1e-5)


@pytest.mark.parametrize("outputs", [OUTPUTS, VALUES], ids=["policy", "value"])
@pytest.mark.parametrize(
    "options", [{"param_dtype": "bf16"}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}]
)
def test_computes_in_half_precision_and_keeps_fp32(outputs: Any, options: dict[str, Any]) -> None:
    batches, losses = toy_batches(toy_samples(4)), []
    for chosen in ({}, options):
        model = toy_value_model() if outputs is VALUES else toy_model()
        strategy = Fsdp2Strategy(model, SETTINGS, options=chosen)
        losses.append(metric(strategy.train_step(batches, WeightedLoss(outputs=outputs)), "loss"))
        assert all(tensor.dtype == torch.float32 for tensor in weights_of(strategy).values())
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.05)


def test_says_what_torch_refuses() -> None:
    with pytest.raises(ConfigError, match="fully_shard"):
        Fsdp2Strategy(toy_model(), SETTINGS, options={"reshard_after_forward": 3})


def test_says_how_it_shards() -> None:
    info = Fsdp2Strategy(toy_model(), SETTINGS, options={}).info()
    assert "over 1 rank" in info.optimizer
    assert info.model.num_parameters == sum(p.numel() for p in toy_model().parameters())
