from __future__ import annotations

import pickle

import pytest
import torch

from turnwise.algorithms.losses import ValueLoss, first_tokens
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import ModelOutputs

NAN = float("nan")
MASKS = [[0, 1, 1, 0], [0, 1], [0, 0, 1, 1, 1], [0, 0]]


def random_batch(make_batch, weights=None):
    generator = torch.Generator().manual_seed(0)
    old, returns, values = (torch.randn(sum(map(len, MASKS)), generator=generator) for _ in range(3))
    return make_batch(MASKS, weights, values=old, returns=returns), values


def stepped(batch, values, **settings):
    """The loss, its gradient by the values, and the reduced metrics."""
    leaf = torch.as_tensor(values).clone().requires_grad_()
    loss, metrics = ValueLoss(AlgorithmSettings(**settings))(ModelOutputs(values=leaf), batch)
    loss.backward()
    return loss.item(), leaf.grad.tolist(), reduce_metrics(metrics)


def by_hand(values, old, target, clip):
    error = (values - target) ** 2
    if clip is not None:
        error = max(error, (min(max(values, old - clip), old + clip) - target) ** 2)
    return 0.5 * error


@pytest.mark.parametrize("clip", [None, 0.2, 5.0])
@pytest.mark.parametrize("weights", [None, [0.5, 1.0, 2.0, 0.0]])
def test_it_is_the_mean_over_trained_tokens(clip, weights, make_batch):
    batch, values = random_batch(make_batch, weights=weights)
    loss, _, reduced = stepped(batch, values, value_clip=clip)
    chosen = batch.response_mask.nonzero().squeeze(-1).tolist()
    numbers = [(values[i].item(), batch.values[i].item(), batch.returns[i].item(), clip) for i in chosen]
    shares = [batch.weights[i].item() / sum(batch.weights[j].item() for j in chosen) for i in chosen]

    def mean(of):
        return sum(share * of(*row) for share, row in zip(shares, numbers, strict=True))

    expected = {
        "critic/loss": mean(by_hand),
        "critic/vpred": mean(lambda value, old, target, clip: value),
        "critic/value": mean(lambda value, old, target, clip: old),
        "critic/error": mean(lambda value, old, target, clip: (value - target) ** 2),
    }
    if clip is not None:
        expected["critic/clipfrac"] = mean(lambda *row: by_hand(*row) > by_hand(*row[:3], clip=None))
    assert loss == pytest.approx(expected["critic/loss"], abs=1e-6)
    assert reduced == pytest.approx(expected, abs=1e-6)


def test_a_clipped_value_has_no_gradient_beyond_its_bound(make_batch):
    batch = make_batch([[0, 1], [0, 1]], values=[0.0] * 4, returns=[1.0] * 4)
    _, gradient, _ = stepped(batch, [0.0, 0.5, 0.0, 0.1], value_clip=0.2)
    assert gradient == pytest.approx([0.0, 0.0, 0.0, -0.45])


def test_by_turn_it_is_the_mean_over_the_first_tokens_of_turns(make_batch):
    batch = make_batch([[0, 1, 1, 0, 1], [0, 1, 1]], values=[0.0] * 8, returns=[0.0, 1, 9, 9, 2, 9, 3, 9])
    batch.turn_id = torch.tensor([-1, 0, 0, -1, 1, -1, 0, 0])
    batch.denominators = batch.denominators._replace(num_turns=3.0)
    assert first_tokens(batch).tolist() == [False, True, False, False, True, False, True, False]
    loss, gradient, reduced = stepped(batch, [0.0] * 8, gae_granularity="turn")
    assert loss == pytest.approx(0.5 * (1 + 4 + 9) / 3)
    assert gradient == pytest.approx([0, -1 / 3, 0, 0, -2 / 3, 0, -1, 0])
    assert reduced["critic/error"] == pytest.approx(14 / 3)


def test_turns_that_touch_are_told_apart_and_one_with_a_hole_begins_once(make_batch):
    """The turn counts once in `denominators`, and credit has one value of it."""
    batch = make_batch([[0, 1, 0, 1], [0, 1, 1]])
    for second, begins in ((0, [False, True, False]), (1, [False, True, True])):
        batch.turn_id = torch.tensor([-1, 0, -1, 0, -1, 0, second])
        assert first_tokens(batch).tolist() == [False, True, False, False, *begins]


@pytest.mark.parametrize("granularity", ["token", "turn"])
def test_nan_outside_the_mask_changes_neither_loss_nor_gradient_nor_metrics(granularity, make_batch):
    results = []
    for poison in (0.0, NAN, float("inf")):
        batch, values = random_batch(make_batch)
        batch.denominators = batch.denominators._replace(num_turns=3.0)
        outside = ~batch.response_mask
        for array in (batch.values, batch.returns, values):
            array[outside] = poison
        results.append(stepped(batch, values, value_clip=0.5, gae_granularity=granularity))
    assert results[0] == results[1] == results[2]
    assert any(results[0][1])


def test_a_batch_without_trained_tokens_adds_nothing(make_batch):
    batch = make_batch([[0, 0]], values=[NAN] * 2, returns=[NAN] * 2)
    loss, _, reduced = stepped(batch, [0.0] * 2)
    assert loss == 0.0 and "critic/vpred" not in reduced


def test_it_can_be_sent_to_the_ranks():
    assert pickle.loads(pickle.dumps(ValueLoss(AlgorithmSettings(value_clip=0.3)))).clip == 0.3
