"""Results don't depend on how the samples of an optimiser step are packed: in fp32 mean |Δ| ≤ 1e-6 and max
|Δ| ≤ 1e-4."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from strategy_contract import OUTPUTS, WeightedLoss
from toy_model import add_noise, toy_batches, toy_model, toy_samples
from transformers import PreTrainedModel

from turnwise.batching.pack import unpack
from turnwise.batching.plan import micro_batches
from turnwise.models.forward import make_forward
from turnwise.models.lora import Adapters, LoRASettings
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings
from turnwise.training.torch_strategy import TorchStrategy

SAMPLES = toy_samples(16, max_length=200)
LENGTHS = [sample.num_tokens for sample in SAMPLES]
PLANS = {
    "one by one": [[i] for i in range(16)],
    "4 sequences": micro_batches(LENGTHS, max_sequences=4),
    "512 tokens": micro_batches(LENGTHS, max_tokens=512),
    "all packed": [list(range(16))],
}
LAYOUTS = [
    ("all packed", "turnwise_packed"),
    ("512 tokens", "turnwise_packed"),
    ("4 sequences", "turnwise_packed"),
    ("4 sequences", "sdpa"),
    ("512 tokens", "eager"),
]


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (got - expected).abs()
    assert difference.mean() <= 1e-6 and difference.max() <= 1e-4


def adapted_model(attn_implementation: str) -> PreTrainedModel:
    """A model whose adapters have learnt something: as long as B is 0, A has no gradient."""
    model = toy_model(attn_implementation=attn_implementation)
    Adapters(model, LoRASettings(rank=4, alpha=8))
    add_noise(model)
    return model


def loss_and_gradients(
    plan: Sequence[Sequence[int]], attention: str, make_model: Callable[..., PreTrainedModel]
) -> tuple[torch.Tensor, torch.Tensor]:
    model = make_model(attn_implementation=attention)
    policy, loss, total = make_forward(model), WeightedLoss(), torch.zeros(())
    for batch in toy_batches(SAMPLES, plan):
        tensors = batch.map(torch.as_tensor)
        value, _ = loss(policy(tensors, OUTPUTS), tensors)
        value.backward()
        total += value.detach()
    return total, torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad]
    )


@pytest.mark.parametrize("make_model", [toy_model, adapted_model])
@pytest.mark.parametrize(("plan", "attention"), LAYOUTS)
def test_losses_and_gradients(plan: str, attention: str, make_model: Callable[..., PreTrainedModel]) -> None:
    loss, gradients = loss_and_gradients(PLANS[plan], attention, make_model)
    expected_loss, expected_gradients = loss_and_gradients(PLANS["one by one"], "sdpa", make_model)
    assert expected_gradients.abs().max() > 0.05
    assert_equal(loss, expected_loss)
    assert_equal(gradients, expected_gradients)


def by_sample(plan: Sequence[Sequence[int]], attention: str) -> torch.Tensor:
    strategy = TorchStrategy(toy_model(attn_implementation=attention))
    batches = toy_batches(SAMPLES, plan)
    parts: dict[int, torch.Tensor] = {}
    for indices, batch, arrays in zip(plan, batches, strategy.forward(batches, OUTPUTS), strict=True):
        parts |= zip(indices, map(torch.tensor, unpack(arrays["logprobs"], batch.lengths)), strict=True)
    return torch.cat([parts[index] for index in range(len(SAMPLES))])


@pytest.mark.parametrize(("plan", "attention"), LAYOUTS)
def test_logprobs_equal_a_plain_forward(plan: str, attention: str) -> None:
    model, expected = toy_model(attn_implementation="eager"), []
    with torch.no_grad():
        for sample in SAMPLES:
            ids = torch.tensor(sample.token_ids)
            logprobs = (
                torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None]).squeeze(-1)
            )
            expected.append(
                torch.cat([torch.zeros(1), logprobs]).where(torch.tensor(sample.response_mask), 0)
            )
    assert_equal(by_sample(PLANS[plan], attention), torch.cat(expected))


def test_training_sees_the_very_log_probs_of_the_forward_pass() -> None:
    """They are equal bit by bit, so the ratio of the first update is exactly 1."""
    batch = toy_batches(SAMPLES)[0]
    old = torch.tensor(TorchStrategy(toy_model()).forward([batch], OUTPUTS)[0]["logprobs"])
    trained = make_forward(toy_model())(batch.map(torch.as_tensor), OUTPUTS).logprobs
    assert trained.requires_grad and torch.equal(trained.detach(), old)


def test_computing_activations_twice_changes_no_bit() -> None:
    batches = toy_batches(SAMPLES, PLANS["4 sequences"])
    once, twice = (
        TorchStrategy(
            toy_model(), StrategySettings(OptimizerSettings(1e-3), is_gradient_checkpointing=is_twice)
        )
        for is_twice in (False, True)
    )
    for strategy in (once, twice):
        strategy.train_step(batches, WeightedLoss())
    for (name, weight), (_, same), before in zip(
        once.weights(), twice.weights(), toy_model().parameters(), strict=True
    ):
        assert torch.equal(weight, same) and not torch.equal(weight, before), name
