from __future__ import annotations

import numpy as np
import pytest

from turnwise.algorithms.normalization import resolve_normalizer
from turnwise.algorithms.settings import RewardNormalization

SCORES = np.array([1.0, 0.0, 0.0, 1.0, 3.0, 3.0])
IDS = np.array([0, 0, 0, 0, 1, 1])
GROUP = ("traj_group_id", "mean_std")


def normalized(asked, scores=SCORES, ids=IDS, weights=None):
    return resolve_normalizer(RewardNormalization(**asked), GROUP)(
        np.asarray(scores, float), np.asarray(ids), weights
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"method": "identity"}, SCORES),
        ({"method": "mean"}, [0.5, -0.5, -0.5, 0.5, 0, 0]),
        ({"method": "mean_std"}, [0.866024, -0.866024, -0.866024, 0.866024, 0, 0]),
        ({}, [0.866024, -0.866024, -0.866024, 0.866024, 0, 0]),
        ({"norm_std_type": "batch"}, [0.365962, -0.365962, -0.365962, 0.365962, 0, 0]),
        (
            {"norm_mean_type": "batch", "norm_std_type": "batch"},
            [-0.243975, -0.975899, -0.975899, -0.243975, 1.219874, 1.219874],
        ),
        ({"method": "mean_std", "norm_std_type": "none"}, [0.5, -0.5, -0.5, 0.5, 0, 0]),
    ],
)
def test_worked_numbers(asked, expected):
    np.testing.assert_allclose(normalized(asked), expected, atol=1e-6)


@pytest.mark.parametrize(
    "asked", [{"method": "mean"}, {}, {"method": "asym_clip"}, {"norm_std_type": "batch"}]
)
def test_a_group_of_one_is_zero(asked):
    assert normalized(asked, [5.0, 1.0, 2.0], [0, 1, 1])[0] == 0.0


def test_equal_scores_are_zero_also_when_they_are_rounded():
    np.testing.assert_array_equal(normalized({}, [0.1 + 0.2, 0.3, 0.3], [0, 0, 0]), 0.0)


def test_asym_clip_is_bounded():
    clipped = normalized({"method": "asym_clip"}, [0.0] * 15 + [10.0, -10.0], [0] * 17)
    plain = normalized({}, [0.0] * 15 + [10.0, -10.0], [0] * 17)
    assert plain.min() < -1.0
    np.testing.assert_allclose(clipped, plain.clip(-1, 3))


@pytest.mark.parametrize("parts", [3, 6, 7, 10])
@pytest.mark.parametrize("method", ["mean", "mean_std"])
def test_one_run_of_several_trajectories_is_a_group_of_one(parts, method):
    weights = np.full(parts, 1.0 / parts)
    np.testing.assert_array_equal(normalized({"method": method}, np.arange(parts), [0] * parts, weights), 0.0)


def test_the_scores_that_are_given_are_not_changed():
    scores = SCORES.copy()
    normalized({}, scores)
    np.testing.assert_array_equal(scores, SCORES)


def test_running_statistics_are_those_of_all_batches_so_far():
    rng = np.random.default_rng(0)
    normalize = resolve_normalizer(
        RewardNormalization(norm_mean_type="running", norm_std_type="running"), GROUP
    )
    seen = np.zeros(0)
    for size in (4, 1, 6):
        scores = rng.normal(3.0, 2.0, size)
        seen = np.concatenate((seen, scores))
        expected = (scores - seen.mean()) / (seen.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(normalize(scores, np.zeros(size, int)), expected, atol=1e-12)


def test_a_running_deviation_scales_what_the_group_s_mean_has_centred():
    normalize = resolve_normalizer(RewardNormalization(norm_std_type="running"), GROUP)
    normalize(np.array([10.0, -10.0]), np.array([0, 0]))
    std = np.array([10.0, -10.0, *SCORES]).std(ddof=1)
    expected = np.array([0.5, -0.5, -0.5, 0.5, 0, 0]) / (std + 1e-6)
    np.testing.assert_allclose(normalize(SCORES, IDS), expected, atol=1e-12)


def test_running_statistics_exist_only_where_they_are_used():
    assert resolve_normalizer(RewardNormalization(), GROUP).running is None
    assert normalized({"norm_mean_type": "running"}, [5.0], [0]).tolist() == [0.0], (
        "one score so far has no deviation"
    )
