from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.algorithms.losses import aggregate, token_factors
from turnwise.spec import LOSS_AGG_MODES
from turnwise.types import Denominators


def by_hand(losses, masks, weights, mode, max_length):
    """The definition, with Python loops over a list of sequences."""
    kept = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(losses, masks, strict=True)]
    num_tokens = sum(w * len(row) for w, row in zip(weights, kept, strict=True))
    num_sequences = sum(w for w, row in zip(weights, kept, strict=True) if row)
    sums = [w * sum(row) for w, row in zip(weights, kept, strict=True)]
    if mode == "token-mean":
        return sum(sums) / num_tokens
    if mode == "seq-mean-token-sum":
        return sum(sums) / num_sequences
    if mode == "seq-mean-token-sum-norm":
        return sum(sums) / (num_sequences * max_length)
    return sum(w * sum(row) / len(row) for w, row in zip(weights, kept, strict=True) if row) / num_sequences


def random_step(rng):
    lengths = rng.integers(1, 7, size=6)
    losses = [rng.normal(size=n).tolist() for n in lengths]
    masks = [(rng.random(n) < 0.6).astype(int).tolist() for n in lengths]
    masks[0] = [0] * lengths[0]
    masks[1] = [1] * lengths[1]
    weights = rng.choice([1.0, 0.5, 0.0], size=6, p=[0.6, 0.3, 0.1]).tolist()
    weights[1] = 1.0
    return losses, masks, weights


def part(losses, batch, denominators, mode):
    mask = batch.response_mask
    factors = token_factors(mask, batch.weights, batch.sequence_id, len(batch.lengths), denominators, mode)
    return aggregate(losses, mask, factors)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_equals_the_definition_and_does_not_change_when_a_step_is_cut(mode, make_batch):
    rng = np.random.default_rng(1)
    for _ in range(10):
        losses, masks, weights = random_step(rng)
        step = make_batch(masks, weights, max_length=7)
        flat = torch.tensor([x for row in losses for x in row])
        expected = by_hand(losses, masks, weights, mode, max_length=7)
        assert part(flat, step, step.denominators, mode).item() == pytest.approx(expected, abs=1e-5)

        for cut in (1, 2, 3):
            total = 0.0
            for first in range(0, len(masks), cut):
                chunk = slice(first, first + cut)
                batch = make_batch(masks[chunk], weights[chunk])
                chunk_losses = torch.tensor([x for row in losses[chunk] for x in row])
                total += part(chunk_losses, batch, step.denominators, mode).item()
            assert total == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_factors_outside_the_mask_are_zero(mode, make_batch):
    batch = make_batch([[1, 1, 0, 0], [1, 1, 1, 0]], max_length=4)
    arguments = (batch.weights, batch.sequence_id, len(batch.lengths), batch.denominators, mode)
    assert ((token_factors(batch.response_mask, *arguments) > 0) == batch.response_mask).all()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_nan_outside_the_mask_changes_neither_value_nor_gradient(mode, make_batch):
    batch = make_batch([[1, 0, 1], [0, 0]])
    losses = torch.tensor([1.0, float("nan"), 3.0, float("nan"), float("inf")], requires_grad=True)
    value = part(losses, batch, batch.denominators, mode)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(losses.grad).all()
    assert losses.grad[1] == losses.grad[3] == losses.grad[4] == 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_step_without_trained_tokens_is_zero(mode, make_batch):
    assert part(torch.ones(2), make_batch([[0, 0]]), Denominators(0.0, 0.0, 4), mode).item() == 0.0
