from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.algorithms.mismatch import mismatch_metrics, staleness_metrics, token_mismatch
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import VersionRun


def filled(make_sample, mask, old, sampled):
    sample = make_sample(mask)
    sample.old_logprobs = np.array(old, dtype=np.float32)
    sample.rollout_logprobs = np.array(sampled, dtype=np.float32)
    return sample


def test_equals_the_definitions_over_trained_tokens(make_sample):
    rng = np.random.default_rng(0)
    masks = [rng.integers(0, 2, size=40) for _ in range(5)]
    samples = [filled(make_sample, mask, rng.normal(size=40), rng.normal(size=40)) for mask in masks]
    got = reduce_metrics(mismatch_metrics(samples))
    difference = np.concatenate([(s.old_logprobs - s.rollout_logprobs)[s.response_mask] for s in samples]).astype(np.float64)
    rho = np.exp(difference)
    assert got["actor/train_infer_diff_token_mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-5)
    assert got["actor/train_infer_diff_token_max"] == pytest.approx(np.abs(difference).max(), rel=1e-5)
    assert got["actor/train_infer_diff_token_p99"] == pytest.approx(np.percentile(np.abs(difference), 99), rel=1e-5)
    assert got["actor/train_infer_ratio_token_mean"] == pytest.approx(rho.mean(), rel=1e-5)
    assert got["actor/train_infer_kl"] == pytest.approx((rho - 1 - difference).mean(), rel=1e-5)
    assert got["actor/train_infer_ess"] == pytest.approx(rho.sum() ** 2 / (len(rho) * (rho**2).sum()), rel=1e-5)


def test_equal_log_probs_are_no_mismatch(make_sample):
    got = reduce_metrics(mismatch_metrics([filled(make_sample, [0, 1, 1], [np.nan, -1, -2], [0, -1, -2])]))
    assert got["actor/train_infer_ess"] == 1.0
    assert got["actor/train_infer_diff_token_max"] == got["actor/train_infer_kl"] == 0.0


def test_the_kl_is_that_of_the_sampler_to_the_trainer():
    """E over the sampler's distribution of the logged estimate is KL(sampled ‖ old)."""
    sampled = torch.log_softmax(torch.tensor([0.1, 1.0, -0.3], dtype=torch.float64), 0)
    old = torch.log_softmax(torch.tensor([0.5, 0.2, 0.2], dtype=torch.float64), 0)
    estimates = [
        reduce_metrics(token_mismatch(old[i : i + 1], sampled[i : i + 1], torch.tensor([True])))["actor/train_infer_kl"]
        for i in range(3)
    ]
    expected = (sampled.exp() * (sampled - old)).sum().item()
    assert (sampled.exp() * torch.tensor(estimates)).sum().item() == pytest.approx(expected, abs=1e-6)


def test_nothing_is_logged_without_old_log_probs(make_sample):
    assert mismatch_metrics([make_sample([0, 1])]) == []
    assert mismatch_metrics([]) == []


def test_staleness_counts_tokens_of_every_run(make_sample):
    fresh, stale = make_sample([0, 1, 1]), make_sample([1, 1, 1, 0])
    fresh.versions = ((VersionRun(5, 2),),)
    stale.versions = ((VersionRun(3, 1), VersionRun(4, 2)),)
    got = reduce_metrics(staleness_metrics([fresh, stale], version=5))
    assert got == pytest.approx({"actor/staleness_mean": (2 + 1 + 1) / 5, "actor/staleness_max": 2.0})
    assert staleness_metrics([make_sample([0])], version=5) == []
