"""Which tokens clip_cov and kl_cov choose over an optimiser step."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.algorithms.choices import clip_cov, kl_cov, token_covariances
from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings, Correction, RatioBand
from turnwise.batching.pack import pack
from turnwise.types import Denominators, Sample

STEP = Denominators(1.0, 1.0, 64)


def choose(fraction, low=1.0, high=5.0, seed=0, covariances=None):
    values = np.arange(10.0) if covariances is None else covariances
    return clip_cov(
        values, seed, fraction=fraction, covariance_low=low, covariance_high=high, clip_low=0.2, clip_high=0.2
    )


def test_covariances_are_products_of_deviations_from_the_step_s_means():
    advantages, old = np.array([2.0, 0.0, 1.0]), np.array([-1.0, -4.0, -4.0])
    assert token_covariances(advantages, old).tolist() == pytest.approx([2.0, 1.0, 0.0])


def test_clip_cov_draws_its_share_of_all_tokens_from_the_band():
    for seed in range(20):
        chosen = choose(0.3, seed=seed)
        assert len(set(chosen.tolist())) == 3 and set(chosen.tolist()) <= {1, 2, 3, 4, 5}
    assert set(choose(0.9)) == {1, 2, 3, 4, 5}
    assert {tuple(choose(0.3, seed=seed)) for seed in (4, 4)} == {tuple(choose(0.3, seed=4))}
    assert len({tuple(sorted(choose(0.3, seed=seed))) for seed in range(20)}) > 3


@pytest.mark.parametrize(("fraction", "number"), [(0.0, 0), (1e-9, 1), (0.19, 1), (0.2, 2)])
def test_a_share_is_whole_tokens_and_one_at_least(fraction, number):
    assert len(choose(fraction)) == len(kl_cov(np.arange(10.0), 0, fraction=fraction, coef=1.0)) == number


def test_nothing_is_chosen_where_no_covariance_is_in_the_band():
    assert len(choose(0.5, low=20.0, high=30.0)) == 0


def test_kl_cov_takes_the_largest_and_of_equal_ones_the_first():
    covariances = np.array([0.0, 3.0, -9.0, 3.0, 1.0, 3.0])
    assert kl_cov(covariances, 0, fraction=0.4, coef=1.0).tolist() == [1, 3]


def sample(advantages, old, mask=None, weight=1.0, rollout=None):
    count = len(advantages)
    kept = np.array([0, *mask], np.bool_) if mask else np.array([0] + [1] * count, np.bool_)
    arrays = {
        "advantages": advantages,
        "old_logprobs": old,
        "rollout_logprobs": old if rollout is None else rollout,
    }
    padded = {name: np.array([np.nan, *values], np.float32) for name, values in arrays.items()}
    return Sample(np.arange(count + 1), kept, turn_spans=(), weight=weight, **padded)


def chosen(samples, seed=0, **settings):
    annotations, _ = PolicyLoss(AlgorithmSettings(**settings)).prepare(pack(samples, STEP), seed)
    return np.flatnonzero(annotations.selected_mask).tolist()


KL_COV = {"pg_variant": "kl_cov", "pg_args": {"fraction": 0.25}}


def test_the_choice_is_over_the_trained_tokens_of_the_whole_step():
    """Means over 4 tokens: A 0, old −2. The largest covariance is that of the last: (−1)·(−3) = 3."""
    first, second = sample([1.0, 1.0], [-1.0, -1.0]), sample([-1.0, -1.0], [-1.0, -5.0])
    assert chosen([first, second], **KL_COV) == [5]
    assert chosen([second, first], **KL_COV) == [2]


def test_tokens_that_the_loss_does_not_count_are_neither_chosen_nor_in_the_means():
    first, padding = (
        sample([1.0, -1.0, 0.0, 0.0], [-1.0, -2.0, -1.5, -1.5]),
        sample([9.0] * 4, [-9.0] * 4, weight=0.0),
    )
    masked = sample([9.0, 9.0], [-1.0, -9.0], mask=[0, 0])
    assert chosen([first, padding, masked], **KL_COV) == chosen([first], **KL_COV) == [1]
    drifted = sample([9.0, 9.0], [-1.0, -9.0], rollout=[-8.0, -1.0])
    assert chosen([first, drifted], train_infer_correction=Correction(filters=(RatioBand(),)), **KL_COV) == [
        1
    ]


def test_the_seed_of_the_step_decides():
    step = [sample(np.linspace(-2, 2, 40), np.linspace(-4, 0, 40))]
    settings = {"pg_variant": "clip_cov", "pg_args": {"fraction": 0.1, "covariance_low": 0.0}}
    assert (
        chosen(step, seed=1, **settings)
        == chosen(step, seed=1, **settings)
        != chosen(step, seed=2, **settings)
    )


def test_without_old_log_probs_nothing_can_be_chosen():
    unknown = sample([1.0], [-1.0])
    unknown.old_logprobs = None
    with pytest.raises(ValueError, match="kl_cov needs old_logprobs"):
        chosen([unknown], **KL_COV)
    assert "old_logprobs" in AlgorithmSettings(pg_variant="kl_cov").needs
