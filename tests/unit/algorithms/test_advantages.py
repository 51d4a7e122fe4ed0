"""What every estimator's credit ends with, and the order of what estimators on scores do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.algorithms.advantages import clip, summary, write_advantages
from turnwise.algorithms.estimator import tokens_of
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


def test_every_trained_token_of_every_sample_gets_the_number_and_no_other(make_group):
    group = make_group([2.0], masks=[[[0, 1, 0, 1], [0, 0, 1]]])
    credit([group])
    assert [sample.advantages.tolist() for sample in group.samples] == [[0, 2, 0, 2], [0, 0, 2]]
    assert all(sample.advantages.dtype == np.float32 for sample in group.samples)


def test_the_score_has_turn_and_outcome_rewards(make_group):
    group = make_group([1.0])
    group.trajectories[0].outcome_rewards["judge"] = 0.5
    credit([group])
    assert group.samples[0].advantages.tolist() == [0.0, 1.5, 1.5]


def test_kl_comes_off_the_score_before_it_is_transformed_and_the_clip_comes_last(make_group):
    groups = [make_group([1.0, 0.0], masks=[[[0, 1, 1], [1, 1]], [[0, 1, 0]]])]
    fill_logprobs(groups, np.random.default_rng(0))
    sums = []
    for trajectory in groups[0].trajectories:
        tokens = [(s.old_logprobs[t], s.ref_logprobs[t]) for s in trajectory.samples for t in np.flatnonzero(s.response_mask)]
        sums.append(sum(float(old) - float(ref) for old, ref in tokens))
    seen = []

    class Watched(ScoreEstimator):
        def transform(self, outcomes):
            seen.extend(outcomes.scores)
            return outcomes.scores * 100.0

    settings = AlgorithmSettings(add_token_level_kl=True, init_kl_coef=0.3, reward_clip=5.0)
    Watched(settings, KLController(0.3)).credit(groups)
    expected = [1.0 - 0.3 * sums[0], -0.3 * sums[1]]
    assert seen == pytest.approx(expected, abs=1e-5)
    assert groups[0].trajectories[0].score_kl_penalty == pytest.approx(0.3 * sums[0], abs=1e-5)
    np.testing.assert_allclose(groups[0].samples[0].advantages[1], np.clip(100 * expected[0], -5, 5), rtol=1e-5)


def test_the_controller_is_steered_by_the_mean_over_trajectories_of_the_mean_over_tokens(make_group):
    groups = [make_group([1.0, 0.0], masks=[[[1, 1, 1, 1]], [[0, 1]]])]
    fill_logprobs(groups, np.random.default_rng(1))
    controller = KLController(0.2, target=0.1, horizon=100.0)
    metrics = credit(groups, controller, add_token_level_kl=True, init_kl_coef=0.2, kl_penalty="k2")

    means = []
    for sample in samples_of(groups):
        old, ref = (torch.from_numpy(a[sample.response_mask]) for a in (sample.old_logprobs, sample.ref_logprobs))
        means.append(kl_divergence(old, ref, "k2").mean().item())
    assert metrics["critic/kl"] == pytest.approx(np.mean(means), abs=1e-5)
    assert metrics["critic/kl_coef"] == 0.2
    expected = KLController(0.2, target=0.1, horizon=100.0)
    expected.update(np.mean(means), 2)
    assert controller.coef == pytest.approx(expected.coef)


def test_no_kl_is_logged_where_a_forward_pass_is_missing(make_group):
    metrics = credit([make_group([1.0, 0.0])])
    assert not any(name.startswith("critic/kl") for name in metrics)


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


def test_whitening_is_over_all_trained_tokens_of_the_batch_and_the_clip_follows(make_group):
    groups = [make_group([3.0, 1.0], masks=[[[0, 1, 1, 1]], [[0, 1]]]), make_group([0.0], masks=[[[1, 0]]])]
    credit(groups, whiten_advantages=True)
    tokens = np.array([3.0, 3.0, 3.0, 1.0, 0.0])
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    got = np.concatenate([s.advantages[s.response_mask] for s in samples_of(groups)])
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert all((s.advantages[~s.response_mask] == 0).all() for s in samples_of(groups))

    metrics = credit(groups, whiten_advantages=True, advantage_clip=0.5)
    got = np.concatenate([s.advantages[s.response_mask] for s in samples_of(groups)])
    np.testing.assert_allclose(got, expected.clip(-0.5, 0.5), rtol=1e-5)
    assert metrics["critic/advantage_clip_frac"] == pytest.approx((np.abs(expected) > 0.5).mean())


def test_one_trained_token_survives_whitening(make_group):
    group = make_group([2.0], masks=[[[0, 1, 0]]])
    credit([group], whiten_advantages=True)
    assert group.samples[0].advantages.tolist() == [0.0, 2.0, 0.0]


def test_a_batch_without_trained_tokens_is_credited_zeros(make_group):
    group = make_group([1.0], masks=[[[0, 0]]])
    tokens = tokens_of([group])
    assert write_advantages(tokens, np.zeros(0), AlgorithmSettings(whiten_advantages=True, advantage_clip=1.0)) == []
    assert group.samples[0].advantages.tolist() == [0.0, 0.0]
    assert clip("share", np.zeros(0), 1.0)[1] == summary("x", np.zeros(0)) == []
    assert credit([]) == {}


def test_metrics_of_credit(make_group):
    metrics = credit([make_group([1.0, 0.0]), make_group([1.0, 1.0])], reward_clip=0.5)
    assert metrics["critic/score/mean"] == 0.75
    assert metrics["critic/score/max"] == 1.0
    assert metrics["critic/rewards/mean"] == pytest.approx(0.375)
    assert metrics["critic/reward_clip_frac"] == 0.75
    assert metrics["critic/advantages/min"] == 0.0
