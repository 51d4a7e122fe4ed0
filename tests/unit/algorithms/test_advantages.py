"""What every estimator's credit ends with, and the order of what estimators on scores do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.algorithms.kl import KLController, kl_divergence
from turnwise.algorithms.score_estimator import ScoreEstimator
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import samples_of


class Plain(ScoreEstimator):
    """Scores as they are."""


def credit(groups, controller=None, **settings):
    return reduce_metrics(Plain(AlgorithmSettings(**settings), controller).credit(groups))


def fill_logprobs(groups, rng):
    """Old and reference log-probs, with NaN outside the response mask."""
    for sample in samples_of(groups):
        for name in ("old_logprobs", "ref_logprobs"):
            array = rng.normal(size=sample.num_tokens).astype(np.float32)
            setattr(sample, name, np.where(sample.response_mask, array, np.float32("nan")))


def test_the_controller_is_steered_by_the_mean_over_trajectories_of_the_mean_over_tokens(make_group):
    groups = [make_group([1.0, 0.0], masks=[[[1, 1, 1, 1]], [[0, 1]]])]
    fill_logprobs(groups, np.random.default_rng(1))
    controller = KLController(0.2, target=0.1, horizon=100.0)
    metrics = credit(groups, controller, add_token_level_kl=True, init_kl_coef=0.2, kl_penalty="k2")

    means = []
    for sample in samples_of(groups):
        old, ref = (
            torch.from_numpy(a[sample.response_mask]) for a in (sample.old_logprobs, sample.ref_logprobs)
        )
        means.append(kl_divergence(old, ref, "k2").mean().item())
    assert metrics["critic/kl"] == pytest.approx(np.mean(means), abs=1e-5)
    assert metrics["critic/kl_coef"] == 0.2
    expected = KLController(0.2, target=0.1, horizon=100.0)
    expected.update(np.mean(means), 2)
    assert controller.coef == pytest.approx(expected.coef)


def test_a_sample_without_trained_tokens_needs_no_log_probs(make_group):
    groups = [make_group([1.0, 0.0], masks=[[[0, 1], [0, 0]], [[0, 1]]])]
    fill_logprobs(groups, np.random.default_rng(2))
    idle = groups[0].samples[1]
    idle.old_logprobs = idle.ref_logprobs = None
    assert "critic/kl" in credit(groups, add_token_level_kl=True, init_kl_coef=0.1)
    assert idle.advantages.tolist() == [0.0, 0.0]


def test_a_penalty_without_its_forward_passes_is_refused(make_group):
    with pytest.raises(ValueError, match="ref_logprobs"):
        credit([make_group([1.0, 0.0])], add_token_level_kl=True, init_kl_coef=0.1)


def test_metrics_of_credit(make_group):
    metrics = credit([make_group([1.0, 0.0]), make_group([1.0, 1.0])], reward_clip=0.5, advantage_clip=0.25)
    assert metrics["critic/score/mean"] == 0.75
    assert metrics["critic/score/max"] == 1.0
    assert metrics["critic/rewards/mean"] == pytest.approx(0.375)
    assert metrics["critic/reward_clip_frac"] == metrics["critic/advantage_clip_frac"] == 0.75
    assert metrics["critic/advantages/min"] == 0.0
    assert credit([]) == {}
