"""Group policy gradient (Chu et al. 2025, arXiv:2504.02546)."""

from __future__ import annotations

import numpy as np

from turnwise.algorithms.normalization import MIN_STD, Scores, group_statistics
from turnwise.algorithms.response_tokens import Array, Index
from turnwise.algorithms.score_estimator import ScoreEstimator, TrajectoryScores
from turnwise.spec import ESTIMATORS


class GPG(ScoreEstimator):
    """A = α(s − μ) over the siblings of a task, on every trained token; α makes up for groups that teach nothing."""

    spec = ESTIMATORS["gpg"]

    def transform(self, outcomes: TrajectoryScores) -> Array:
        """The advantages [T] of the trajectories."""
        return rescaled_centred(outcomes.scores, outcomes.groups, outcomes.weights)


def rescaled_centred(scores: Scores, groups: Index, weights: Scores) -> Scores:
    """α(s − μ), α = B / (B − M): B trajectories in the batch, M of them in groups without variance; 0 in those. All [T].

    Whole groups are counted: a graded score that happens to be its group's mean leaves α as it is.

    >>> rescaled_centred(np.array([1.0, 0, 1, 1]), np.array([0, 0, 1, 1]), np.ones(4)).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    mean, std, _ = group_statistics(scores, groups, weights)
    differs = std > MIN_STD
    teaching = float(weights[differs].sum())
    return np.where(differs, scores - mean, 0.0) * (float(weights.sum()) / teaching if teaching else 0.0)
