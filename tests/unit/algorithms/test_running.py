from __future__ import annotations

import numpy as np
import pytest

from turnwise.algorithms.normalization import RunningMoments


def test_batches_add_up_to_the_moments_of_everything():
    rng = np.random.default_rng(0)
    values, weights = 1e6 + rng.normal(size=60), rng.choice([0.25, 0.5, 1.0], size=60)
    running = RunningMoments()
    for part in np.split(np.arange(60), [1, 1, 20, 57]):
        running.update(values[part], weights[part])
    mean = (weights * values).sum() / weights.sum()
    variance = (weights * (values - mean) ** 2).sum() / (weights.sum() - 1)
    assert running.count == pytest.approx(weights.sum())
    assert running.mean == pytest.approx(mean, rel=1e-12)
    assert running.std == pytest.approx(np.sqrt(variance), rel=1e-6)


def test_one_value_has_no_deviation():
    running = RunningMoments()
    assert running.std == 0.0
    running.update(np.array([5.0]), np.ones(1))
    assert (running.mean, running.std) == (5.0, 0.0)
