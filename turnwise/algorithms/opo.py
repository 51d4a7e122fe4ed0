"""On-policy RL with the optimal baseline (Hao et al. 2025, arXiv:2505.23585)."""

from __future__ import annotations

import numpy as np

from turnwise.algorithms.normalization import Scores
from turnwise.algorithms.response_tokens import Array, Index
from turnwise.algorithms.score_estimator import ScoreEstimator, TrajectoryScores
from turnwise.spec import ESTIMATORS


class OPO(ScoreEstimator):
    """A = the score minus the siblings' length-weighted mean, on every trained token."""

    spec = ESTIMATORS["opo"]

    def transform(self, outcomes: TrajectoryScores) -> Array:
        """The advantages [T] of the trajectories."""
        return above_length_weighted_mean(outcomes.scores, outcomes.groups, outcomes.weights * outcomes.lengths)


def above_length_weighted_mean(scores: Scores, groups: Index, lengths: Scores) -> Scores:
    """s_i − Σ len·s / Σ len over the siblings, all [T]; `lengths` are trained tokens, each counted with its weight.

    >>> above_length_weighted_mean(np.array([1.0, 0.0]), np.array([0, 0]), np.array([1.0, 3.0])).tolist()
    [0.75, -0.25]
    """
    _, index = np.unique(groups, return_inverse=True)
    total = np.bincount(index, lengths)
    baseline = np.bincount(index, lengths * scores) / np.where(total > 0, total, 1.0)
    return scores - baseline[index]
