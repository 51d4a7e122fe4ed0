from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.algorithms.correction import staleness_metrics, token_mismatch
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import VersionRun


def test_equals_the_definitions_over_trained_tokens():
    generator = torch.Generator().manual_seed(0)
    old, sampled = torch.randn(200, generator=generator), torch.randn(200, generator=generator)
    mask = torch.rand(200, generator=generator) < 0.5
    old[~mask] = float("nan")
    got = reduce_metrics(token_mismatch(old, sampled, mask))
    difference = (old - sampled)[mask].double().numpy()
    rho = np.exp(difference)
    assert got["actor/train_infer_diff_token_mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-5)
    assert got["actor/train_infer_diff_token_max"] == pytest.approx(np.abs(difference).max(), rel=1e-5)
    assert got["actor/train_infer_diff_token_p99"] == pytest.approx(
        np.percentile(np.abs(difference), 99), rel=1e-5
    )
    assert got["actor/train_infer_ratio_token_mean"] == pytest.approx(rho.mean(), rel=1e-5)
    assert got["actor/train_infer_kl"] == pytest.approx((rho - 1 - difference).mean(), rel=1e-5)
    assert got["actor/train_infer_ess"] == pytest.approx(
        rho.sum() ** 2 / (len(rho) * (rho**2).sum()), rel=1e-5
    )


def test_parts_combine_into_the_statistics_of_all_tokens():
    generator = torch.Generator().manual_seed(0)
    old, sampled = torch.randn(101, generator=generator), torch.randn(101, generator=generator)
    mask = torch.rand(101, generator=generator) < 0.5
    whole = reduce_metrics(token_mismatch(old, sampled, mask))
    cuts = (slice(0, 3), slice(3, 60), slice(60, 101))
    parts = reduce_metrics([m for cut in cuts for m in token_mismatch(old[cut], sampled[cut], mask[cut])])
    assert parts == pytest.approx(whole, rel=1e-5)
    assert token_mismatch(old, sampled, torch.zeros_like(mask)) == []


def test_staleness_counts_tokens_of_every_run(make_group):
    fresh, stale, untrained = make_group([0.0] * 3, masks=[[[0, 1, 1]], [[1, 1, 1, 0]], [[0]]]).samples
    fresh.versions = ((VersionRun(5, 2),),)
    stale.versions = ((VersionRun(3, 1), VersionRun(4, 2)),)
    got = reduce_metrics(staleness_metrics([fresh, stale], version=5))
    assert got == pytest.approx({"actor/staleness_mean": (2 + 1 + 1) / 5, "actor/staleness_max": 2.0})
    assert staleness_metrics([untrained], version=5) == []
