from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_contract import LOGPROBS, WeightedLoss, metric, weights_of
from toy_model import toy_batches, toy_model, toy_samples

from turnwise.errors import ConfigError, ModelError, NotAvailableError
from turnwise.models.fused import fuse_projections
from turnwise.training.cross_entropy import CrossEntropy
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Batch, Metric, ModelOutputs

SETTINGS = OptimizerSettings(1e-2)
BATCHES = toy_batches(toy_samples(4))


def test_a_reference_is_frozen() -> None:
    reference = TorchStrategy(toy_model())
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    with pytest.raises(NotAvailableError, match="torch_train"):
        reference.train_step(BATCHES, WeightedLoss())


def test_a_reference_saves_and_loads_its_weights_but_cannot_become_a_trainer(tmp_path: Path) -> None:
    TorchStrategy(toy_model(seed=1)).save(tmp_path / "state")
    other = TorchStrategy(toy_model(seed=2))
    other.load(tmp_path / "state")
    assert all(torch.equal(t, weights_of(TorchStrategy(toy_model(seed=1)))[n]) for n, t in other.weights())
    with pytest.raises(ModelError, match="without an optimiser"):
        TorchStrategy(toy_model(), StrategySettings(SETTINGS)).load(tmp_path / "state")
    with pytest.raises(ModelError, match="another architecture"):
        TorchStrategy(toy_model(intermediate_size=64)).load(tmp_path / "state")
    with pytest.raises(ModelError, match="no training state"):
        other.load(tmp_path / "nothing")


def test_fused_projections_train_save_and_load_like_separate_ones(tmp_path: Path) -> None:
    separate = TorchStrategy(toy_model(), StrategySettings(SETTINGS))
    fused_model = toy_model()
    fuse_projections(fused_model)
    storage = fused_model.model.layers[0].self_attn.k_proj.weight.untyped_storage().data_ptr()
    fused = TorchStrategy(fused_model, StrategySettings(SETTINGS))
    for strategy in (separate, fused):
        strategy.train_step(BATCHES, WeightedLoss())
        strategy.train_step(BATCHES, WeightedLoss())
    fused.save(tmp_path / "state")
    fused.train_step(BATCHES, WeightedLoss())
    fused.load(tmp_path / "state")
    expected = weights_of(separate)
    for name, tensor in fused.weights():
        torch.testing.assert_close(tensor, expected[name], msg=name)
    attention = fused_model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == storage
    assert attention.k_proj.weight.untyped_storage().data_ptr() == storage


def test_dropout_is_off_even_under_gradient_checkpointing() -> None:
    model = toy_model(attention_dropout=0.5)
    strategy = TorchStrategy(model, StrategySettings(OptimizerSettings(0.0), is_gradient_checkpointing=True))
    assert len({metric(strategy.train_step(BATCHES, WeightedLoss()), "loss") for _ in range(3)}) == 1


def test_checkpointing_recomputes_layers_even_after_someone_called_eval() -> None:
    calls = []
    model = toy_model()
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    strategy = TorchStrategy(model, StrategySettings(SETTINGS, is_gradient_checkpointing=True))
    strategy.forward(BATCHES, LOGPROBS)
    calls.clear()
    model.eval()
    strategy.train_step(BATCHES, WeightedLoss())
    assert len(calls) == 2


def test_bf16_autocast_keeps_fp32_weights_and_stays_near() -> None:
    exact = TorchStrategy(toy_model()).forward(BATCHES, LOGPROBS)[0]["logprobs"]
    strategy = TorchStrategy(toy_model(), StrategySettings(SETTINGS, dtype=torch.bfloat16))
    difference = abs(strategy.forward(BATCHES, LOGPROBS)[0]["logprobs"] - exact)
    assert 0 < difference.mean() < 0.1
    losses = [metric(strategy.train_step(BATCHES, CrossEntropy()), "loss") for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {tensor.dtype for _, tensor in strategy.weights()} == {torch.float32}


def test_fp16_scales_the_loss_and_halves_the_scale_after_an_overflow(tmp_path: Path) -> None:
    exact = TorchStrategy(toy_model(), StrategySettings(SETTINGS)).train_step(BATCHES, CrossEntropy())
    strategy = TorchStrategy(toy_model(), StrategySettings(SETTINGS, dtype=torch.float16))
    # A scale of 2¹⁶ overflows here: steps are skipped until it is small enough.
    while metric(first := strategy.train_step(BATCHES, CrossEntropy()), "skipped_steps"):
        continue
    assert metric(first, "grad_norm") == pytest.approx(metric(exact, "grad_norm"), rel=0.02), (
        "the gradient isn't scaled"
    )
    scale = strategy._loss_scale.factor
    assert 1 < scale < 2.0**16

    class Overflow(CrossEntropy):
        def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Any, list[Metric]]:
            loss, metrics = super().__call__(outputs, batch)
            return loss * float("inf"), metrics

    before = weights_of(strategy)
    assert metric(strategy.train_step(BATCHES, Overflow()), "skipped_steps") == 1
    assert strategy._loss_scale.factor == scale / 2
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(strategy).items())
    strategy.save(tmp_path)
    again = TorchStrategy(toy_model(), StrategySettings(SETTINGS, dtype=torch.float16))
    again.load(tmp_path)
    assert again._loss_scale.factor == scale / 2
    losses = [metric(strategy.train_step(BATCHES, CrossEntropy()), "loss") for _ in range(5)]
    assert losses[-1] < losses[0]


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        TorchStrategy(toy_model().to(torch.bfloat16), StrategySettings(SETTINGS))
    with pytest.raises(NotAvailableError, match="critic"):
        TorchStrategy(toy_model()).forward(BATCHES, frozenset({"values"}))


def test_a_skipped_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    strategy = TorchStrategy(toy_model(), StrategySettings(SETTINGS))
    with caplog.at_level(logging.WARNING, "turnwise.training.base"):
        for _ in range(2):
            strategy.train_step(BATCHES, WeightedLoss(float("nan")))
    assert sum("skipped" in record.message for record in caplog.records) == 1


def test_an_update_that_is_interrupted_is_counted() -> None:
    """By the number of updates a run knows whether its weights are still those of its last finished step."""

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    strategy = TorchStrategy(toy_model(), StrategySettings(SETTINGS))
    before = weights_of(strategy)
    assert strategy._optimizer is not None
    strategy._optimizer.register_step_post_hook(press)
    with pytest.raises(KeyboardInterrupt):
        strategy.train_step(BATCHES, WeightedLoss())
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights_of(strategy).items())
    assert strategy.info().num_updates == 1


def test_temperature_divides_the_logits() -> None:
    hot, cold = (
        TorchStrategy(toy_model(), StrategySettings(temperature=t)).forward(BATCHES, frozenset({"entropy"}))[
            0
        ]["entropy"]
        for t in (2.0, 0.5)
    )
    mask = BATCHES[0].response_mask
    assert (hot[mask] > cold[mask]).mean() > 0.95
