"""What every `TrainStrategy` must do. Subclass `StrategyContract` in a test module and say how to make
one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from toy_model import VOCAB_SIZE, toy_batches, toy_samples, with_kept_ids

from turnwise.protocols import Output, StepPart, TrainStrategy
from turnwise.types import Batch, Metric, ModelOutputs

LOGPROBS: frozenset[Output] = frozenset({"logprobs"})
OUTPUTS: frozenset[Output] = frozenset({"logprobs", "entropy"})
VALUES: frozenset[Output] = frozenset({"values", "next_values"})


class WeightedLoss:
    """−Σ weight·(x + y / 10) over the trained tokens, by the step's tokens, x and y the two outputs of a
    policy (log p and entropy) or of a value model (the values before and after a token)."""

    def __init__(self, scale: float = 1.0, outputs: frozenset[Output] = OUTPUTS) -> None:
        self.scale = scale
        self.outputs = outputs

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Any, list[Metric]]:
        first, second = outputs.named().values()
        loss = -self.scale * (batch.weights * (first + 0.1 * second)).sum() / batch.denominators.num_tokens
        return loss, [Metric("loss", loss.detach(), "sum")]


def weights_of(strategy: TrainStrategy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in strategy.weights()}


def metric(metrics: list[Metric], name: str) -> float:
    """The sum of the values of that name."""
    return float(sum(m.value for m in metrics if m.name == name))


class StrategyContract(ABC):
    """Micro-batches are those of `toy_model`; the model must have its vocabulary. For a value model,
    `outputs` are `VALUES`."""

    outputs: ClassVar[frozenset[Output]] = OUTPUTS

    def loss(self, scale: float = 1.0) -> WeightedLoss:
        return WeightedLoss(scale, self.outputs)

    @abstractmethod
    def make_strategy(self) -> TrainStrategy:
        """A new strategy; each call gives the same weights. The schedule must not be constant."""

    @abstractmethod
    def modules(self, strategy: TrainStrategy) -> Iterable[torch.nn.Module]:
        """Every module of the strategy's model."""

    def test_forward_gives_float32_arrays_aligned_with_tokens(self) -> None:
        batches = toy_batches(toy_samples(5), [[0, 3], [1, 2, 4]])
        results = self.make_strategy().forward(batches, self.outputs)
        for batch, arrays in zip(batches, results, strict=True):
            assert arrays.keys() == self.outputs
            for array in arrays.values():
                assert array.dtype == np.float32 and array.shape == batch.token_ids.shape
                assert not array[~batch.response_mask].any()
                assert array[batch.response_mask].all()

    def test_log_probs_over_kept_ids(self) -> None:
        """Over all ids they are those of the whole vocabulary; over few they are larger; over the token alone
        they are 0."""
        if "logprobs" not in self.outputs:
            return
        strategy, samples = self.make_strategy(), toy_samples(4)
        outputs: frozenset[Output] = frozenset({"logprobs", "full_logprobs"})
        whole = strategy.forward(toy_batches(samples), frozenset({"logprobs"}))[0]["logprobs"]
        for number in (1, 3, VOCAB_SIZE):
            [batch] = toy_batches(with_kept_ids(samples, number))
            results = strategy.forward([batch], outputs)[0]
            np.testing.assert_allclose(results["full_logprobs"], whole, atol=1e-5)
            trained = batch.response_mask
            bounds = {1: np.zeros_like(whole), VOCAB_SIZE: whole}
            if number in bounds:
                np.testing.assert_allclose(results["logprobs"], bounds[number], atol=1e-5)
            else:
                assert (results["logprobs"][trained] > whole[trained]).all()

    def test_a_step_lowers_the_loss_and_reports_itself(self) -> None:
        strategy = self.make_strategy()
        batches = toy_batches(toy_samples(6))
        before = weights_of(strategy)
        losses = [metric(strategy.train_step(batches, self.loss()), "loss") for _ in range(4)]
        assert losses[-1] < losses[0]
        assert any(not torch.equal(before[name], tensor) for name, tensor in weights_of(strategy).items())
        metrics = strategy.train_step(batches, self.loss())
        assert (
            metric(metrics, "grad_norm") > 0
            and metric(metrics, "lr") > 0
            and metric(metrics, "skipped_steps") == 0
        )

    def test_the_model_is_in_evaluation_mode_between_steps(self) -> None:
        """An engine may sample from the same model, and a layer in training mode may drop its cache."""

        class Failing(WeightedLoss):
            def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Any, list[Metric]]:
                raise ArithmeticError

        strategy, batches = self.make_strategy(), toy_batches(toy_samples(3))
        strategy.train_step(batches, self.loss())
        assert not any(module.training for module in self.modules(strategy))
        with pytest.raises(ArithmeticError):
            strategy.train_step(batches, Failing(outputs=self.outputs))
        assert not any(module.training for module in self.modules(strategy))

    def test_micro_batches_add_up_to_the_whole_step(self) -> None:
        samples = toy_samples(6)
        results = []
        for parts in ([range(6)], [[i] for i in range(6)], [[5, 0], [1, 2, 3], [4]]):
            metrics = self.make_strategy().train_step(toy_batches(samples, parts), self.loss())
            results.append((metric(metrics, "loss"), metric(metrics, "grad_norm")))
        np.testing.assert_allclose(results, [results[0]] * 3, rtol=1e-5)

    def test_parts_of_a_step_add_up_to_it(self) -> None:
        """Nothing changes before the last part, whose divisor is that of all; the first forgets a step that
        was left."""
        samples, halves = toy_samples(6), [[[4, 1], [0]], [[5, 2, 3]]]
        whole = self.make_strategy()
        expected = metric(whole.train_step(toy_batches(samples), self.loss(), position=1.0), "grad_norm")
        for divisor in (1.0, 4.0):
            strategy = self.make_strategy()
            before = weights_of(strategy)
            strategy.train_step(toy_batches(samples), self.loss(), position=1.0, part=StepPart(0, None))
            for number, parts in enumerate(halves):
                assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(strategy).items())
                is_last = number == 1
                part = StepPart(number, divisor if is_last else None)
                metrics = strategy.train_step(
                    toy_batches(samples, parts), self.loss(), position=1.0, part=part
                )
                assert (
                    is_last
                    == any(m.name == "grad_norm" for m in metrics)
                    == any(m.name == "lr" for m in metrics)
                )
            np.testing.assert_allclose(metric(metrics, "grad_norm"), expected / divisor, rtol=1e-5)
            if divisor == 1.0:
                for name, tensor in weights_of(whole).items():
                    np.testing.assert_allclose(weights_of(strategy)[name], tensor, atol=1e-5)

    def test_a_step_may_end_with_an_empty_part(self) -> None:
        strategy, batches = self.make_strategy(), toy_batches(toy_samples(3))
        strategy.train_step(batches, self.loss(), part=StepPart(0, None))
        metrics = strategy.train_step([], self.loss(), part=StepPart(1, 1.0))
        expected = self.make_strategy().train_step(batches, self.loss())
        assert metric(metrics, "grad_norm") == metric(expected, "grad_norm") > 0

    def test_a_part_that_is_not_finite_skips_the_step(self) -> None:
        """The step is skipped even if the gradient of the part is finite."""

        class Infinite(WeightedLoss):
            def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Any, list[Metric]]:
                loss, metrics = super().__call__(outputs, batch)
                return loss + float("inf"), metrics

        strategy, batches = self.make_strategy(), toy_batches(toy_samples(3))
        before = weights_of(strategy)
        strategy.train_step(batches, Infinite(outputs=self.outputs), part=StepPart(0, None))
        metrics = strategy.train_step(batches, self.loss(), part=StepPart(1, 1.0))
        assert metric(metrics, "skipped_steps") == 1
        assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(strategy).items())
        assert metric(strategy.train_step(batches, self.loss()), "skipped_steps") == 0

    def test_the_update_does_not_reach_tokens_outside_the_mask(self) -> None:
        """A loss over what is outside the mask sees constants: no gradient, no update."""

        class Outside(WeightedLoss):
            def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Any, list[Metric]]:
                return sum((x * ~batch.response_mask).sum() for x in outputs.named().values()), []

        metrics = self.make_strategy().train_step(toy_batches(toy_samples(3)), Outside(outputs=self.outputs))
        assert metric(metrics, "grad_norm") == 0

    @pytest.mark.parametrize("scale", [float("nan"), float("inf")])
    def test_a_step_that_is_not_finite_changes_nothing(self, scale: float) -> None:
        strategy = self.make_strategy()
        batches = toy_batches(toy_samples(4), [[0, 1], [2, 3]])
        strategy.train_step(batches, self.loss())
        before = weights_of(strategy)
        assert metric(strategy.train_step(batches, self.loss(scale)), "skipped_steps") == 1
        assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(strategy).items())
        assert metric(strategy.train_step(batches, self.loss()), "skipped_steps") == 0

    def test_a_loaded_strategy_continues_bit_by_bit(self, tmp_path: Path) -> None:
        batches = toy_batches(toy_samples(4))
        first = self.make_strategy()
        for position in range(2):
            first.train_step(batches, self.loss(), position)
        first.save(tmp_path / "state")
        first.save(tmp_path / "state")
        second = self.make_strategy()
        second.load(tmp_path / "state")
        for position in range(2, 4):
            expected, got = (
                metric(s.train_step(batches, self.loss(), position), "lr") for s in (first, second)
            )
            assert expected == got
        for name, tensor in weights_of(first).items():
            assert torch.equal(tensor, weights_of(second)[name]), name

    def test_offloading_and_back_changes_nothing(self) -> None:
        strategy, batches = self.make_strategy(), toy_batches(toy_samples(3))
        strategy.train_step(batches, self.loss())
        before = strategy.forward(batches, self.outputs)
        strategy.offload(["weights", "optimizer"])
        strategy.onload(["weights", "optimizer"])
        np.testing.assert_equal(strategy.forward(batches, self.outputs), before)
        strategy.train_step(batches, self.loss())
