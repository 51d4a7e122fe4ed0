"""A strategy that trains adapters: the reference in it, its dropout, and what it goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strategy_contract import LOGPROBS, OUTPUTS, WeightedLoss, metric, weights_of
from toy_model import toy_batches, toy_model, toy_samples

from turnwise.errors import ModelError, NotAvailableError
from turnwise.models.lora import Adapters, LoRASettings
from turnwise.runtime.rank import RankContext
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy

BATCHES = toy_batches(toy_samples(6), [[0, 3, 5], [1, 2, 4]])


def make_strategy(
    dropout: float = 0.0,
    seed: int = 0,
    attention: str = "turnwise_packed",
    rate: float = 1e-2,
    is_twice: bool = False,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
) -> TorchStrategy:
    model = toy_model(seed, attn_implementation=attention)
    adapters = Adapters(model, LoRASettings(rank=4, alpha=8, dropout=dropout, seed=1))
    settings = StrategySettings(OptimizerSettings(rate), dtype=dtype, is_gradient_checkpointing=is_twice)
    return TorchStrategy(model, settings, adapters=adapters, rank=RankContext(rank=rank))


def trained(num_steps: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after some steps."""
    strategy = make_strategy(**options)
    for step in range(num_steps):
        strategy.train_step(BATCHES, WeightedLoss(), float(step))
    return weights_of(strategy)


@pytest.mark.parametrize("attention", ["turnwise_packed", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_in_it_is_a_freshly_loaded_reference_bit_by_bit(attention: str, dtype: torch.dtype) -> None:
    strategy = make_strategy(attention=attention, dtype=dtype)
    for _ in range(3):
        strategy.train_step(BATCHES, WeightedLoss())
    fresh = TorchStrategy(toy_model(attn_implementation=attention), StrategySettings(dtype=dtype)).forward(
        BATCHES, OUTPUTS
    )
    np.testing.assert_equal(strategy.forward(BATCHES, OUTPUTS, without_adapter=True), fresh)
    own = strategy.forward(BATCHES, OUTPUTS)
    assert abs(own[0]["logprobs"] - fresh[0]["logprobs"]).max() > 0.1
    strategy.train_step(BATCHES, WeightedLoss())
    assert not np.array_equal(own[0]["logprobs"], strategy.forward(BATCHES, LOGPROBS)[0]["logprobs"])


def test_without_adapters_there_is_no_base_in_it() -> None:
    with pytest.raises(NotAvailableError, match="lora_rank"):
        TorchStrategy(toy_model()).forward(BATCHES, LOGPROBS, without_adapter=True)


def test_the_log_probs_of_the_first_update_are_the_old_ones() -> None:
    """They are equal without dropout, so the ratio is exactly 1."""
    seen = []

    class Spying(WeightedLoss):
        def __call__(self, outputs, batch):
            seen.append(outputs.logprobs.detach().numpy())
            return super().__call__(outputs, batch)

    strategy = make_strategy(dropout=0.0)
    strategy.train_step(BATCHES, WeightedLoss())
    old = strategy.forward(BATCHES, LOGPROBS)
    strategy.train_step(BATCHES, Spying())
    for before, now in zip(old, seen, strict=True):
        np.testing.assert_array_equal(now, before["logprobs"])


def test_dropout_acts_in_steps_alone_and_the_same_way_at_the_same_place() -> None:
    def losses(strategy: TorchStrategy, positions: list[float]) -> list[float]:
        torch.rand(1)  # somebody else draws from the process's generator
        return [
            metric(strategy.train_step(BATCHES, WeightedLoss(), position), "loss") for position in positions
        ]

    strategies = [make_strategy(dropout=0.5) for _ in range(2)]
    for strategy in strategies:
        before = strategy.forward(BATCHES, LOGPROBS)[0]["logprobs"]
        np.testing.assert_array_equal(before, strategy.forward(BATCHES, LOGPROBS)[0]["logprobs"])
    first, second = (losses(strategy, [0.0, 1.0, 2.0]) for strategy in strategies)
    assert first == second
    still = make_strategy(dropout=0.5, rate=0.0)
    with torch.no_grad():
        for name, parameter in still.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    one, other, again = losses(still, [1.0, 2.0, 1.0])
    assert one == again != other


def test_computing_activations_twice_drops_the_same_twice() -> None:
    once, twice = (trained(dropout=0.5, is_twice=is_twice) for is_twice in (False, True))
    for name, weight in once.items():
        assert torch.equal(weight, twice[name]), name


def test_a_state_of_other_adapters_or_of_another_base_is_refused(tmp_path: Path) -> None:
    make_strategy().save(tmp_path / "adapters")
    TorchStrategy(toy_model(), StrategySettings(OptimizerSettings(1e-2))).save(tmp_path / "whole")
    with pytest.raises(ModelError, match=r"another base model; set pretrain"):
        make_strategy(seed=5).load(tmp_path / "adapters")
    with pytest.raises(ModelError, match=r"holds LoRA adapters, not all parameters; set lora_rank"):
        TorchStrategy(toy_model(), StrategySettings(OptimizerSettings(1e-2))).load(tmp_path / "adapters")
    with pytest.raises(ModelError, match=r"no adapters; continue with it without lora_rank"):
        make_strategy().load(tmp_path / "whole")


def test_a_step_on_another_rank_drops_other_elements() -> None:
    """The ranks are made apart, and none sums gradients with others: what differs between their steps is what
    is dropped."""
    zero, one, again = (trained(1, dropout=0.5, rank=rank) for rank in (0, 1, 1))
    assert all(torch.equal(weight, again[name]) for name, weight in one.items())
    assert any(not torch.equal(weight, zero[name]) for name, weight in one.items())
