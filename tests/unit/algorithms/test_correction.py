"""Importance weights and bands on exp(old − sampled)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from turnwise.algorithms.correction import band_mask, importance_ratio, importance_weights
from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings, Correction, ImportanceWeight, RatioBand
from turnwise.batching.pack import pack
from turnwise.batching.plan import denominators
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import Sample, TurnSpan

LOG2 = math.log(2.0)
NAN = float("nan")


def sample(differences, turns, weight=1.0):
    """Two turns after a prompt token each; `differences` are old − sampled in units of log 2, None outside
    the mask."""
    mask = np.array([d is not None for d in differences])
    sampled = np.full(len(mask), -3.0, np.float32)
    old = np.array([NAN if d is None else -3.0 + d * LOG2 for d in differences], np.float32)
    spans = tuple(TurnSpan(i, start, stop) for i, (start, stop) in enumerate(turns))
    arrays = {"rollout_logprobs": sampled, "old_logprobs": old, "advantages": np.ones(len(mask), np.float32)}
    return Sample(np.arange(len(mask)), mask, turn_spans=spans, weight=weight, **arrays)


FIRST = sample([None, 1, 3, None, -1], [(1, 3), (4, 5)])
SECOND = sample([None, 0, -2], [(1, 3)], weight=0.5)
SAMPLES = [FIRST, SECOND]


def packed(samples=SAMPLES):
    return pack(samples, denominators(samples, 8))


def tensors():
    return packed().map(torch.as_tensor)


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        ("token", [2, 8, 0.5, 1, 0.25]),
        ("segment", [4, 4, 0.5, 0.5, 0.5]),
        ("geometric", [2, 2, 2, 0.5, 0.5]),
        ("sequence", [8, 8, 8, 0.25, 0.25]),
    ],
)
def test_ratios_weights_and_bands_at_each_granularity(granularity, expected):
    batch = tensors()
    mask = batch.response_mask
    assert importance_ratio(batch, granularity)[mask].tolist() == pytest.approx(expected, rel=1e-5)
    weights = importance_weights(batch, Correction(ImportanceWeight(granularity, cap=3.0)))
    assert weights[mask].tolist() == pytest.approx([min(r, 3.0) for r in expected], rel=1e-5)
    assert (weights[~mask] == 0).all()
    keep_mask = band_mask(batch, Correction(filters=(RatioBand(granularity, low=0.4, high=4.5),)))
    assert keep_mask[mask].tolist() == [0.4 <= r <= 4.5 for r in expected]
    assert not keep_mask[~mask].any()


def test_bands_hold_together_and_their_ends_belong_to_them():
    keep_mask = band_mask(
        tensors(), Correction(filters=(RatioBand("token", 0.0, 2.00001), RatioBand("segment", 0.5, 9.0)))
    )
    assert keep_mask[tensors().response_mask].tolist() == [True, False, True, True, True]
    for low, high in ((0.9, 1.0), (1.0, 1.1)):
        keep_mask = band_mask(tensors(), Correction(filters=(RatioBand("token", low, high),)))
        assert keep_mask[tensors().response_mask].tolist() == [False, False, False, True, False]


def test_nothing_asked_for_is_nothing_done():
    annotations, metrics = PolicyLoss(AlgorithmSettings()).prepare(packed(), seed=0)
    assert (annotations, metrics) == ((None, None, None, None), [])
    assert band_mask(tensors(), Correction()) is None and importance_weights(tensors(), Correction()) is None


def prepare(correction):
    return PolicyLoss(AlgorithmSettings(train_infer_correction=correction)).prepare(packed(), seed=0)


def test_the_masked_share_is_one_of_weighted_tokens_and_mean_weights_are_over_the_rest():
    """Out are the tokens of ratio 8 (weight 1) and 0.25 (weight ½), of 4 tokens in all by weight."""
    _, metrics = prepare(Correction(ImportanceWeight(cap=1.5), (RatioBand(low=0.3, high=4.0),)))
    reduced = reduce_metrics(metrics)
    assert reduced["actor/train_infer_masked_frac"] == pytest.approx(1.5 / 4)
    assert reduced["actor/train_infer_weight_mean"] == pytest.approx((1.5 + 0.5 + 0.5 * 1.0) / 2.5, rel=1e-5)


def test_denominators_count_what_is_left():
    annotations, _ = prepare(Correction(filters=(RatioBand("geometric", 1.0, 3.0),)))
    left = [
        Sample(
            s.token_ids,
            s.response_mask,
            s.rollout_logprobs,
            s.turn_spans,
            weight=s.weight,
            keep_mask=keep_mask,
        )
        for s, keep_mask in zip(SAMPLES, np.split(annotations.keep_mask, [5]), strict=True)
    ]
    assert denominators(SAMPLES, 8) == (4.0, 1.5, 8, 2.5)
    assert denominators(left, 8) == (3.0, 1.0, 8, 2.0)


def test_old_log_probs_are_computed_before_it():
    correction = Correction(ImportanceWeight())
    assert "old_logprobs" in AlgorithmSettings(train_infer_correction=correction).needs
    assert "old_logprobs" not in AlgorithmSettings().needs
    unknown = sample([None, 0], [(1, 2)])
    unknown.old_logprobs = None
    with pytest.raises(ValueError, match="needs old_logprobs"):
        PolicyLoss(AlgorithmSettings(train_infer_correction=correction)).prepare(packed([unknown]), seed=0)


def test_a_correction_by_nothing_is_false():
    assert not Correction() and Correction(filters=(RatioBand(),))


def test_huge_drifts_stay_finite():
    far = sample([None, 1e4, -1e4], [(1, 3)])
    for granularity in ("token", "segment", "geometric", "sequence"):
        assert torch.isfinite(importance_ratio(packed([far]).map(torch.as_tensor), granularity)[1:]).all()
