"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

import numpy as np

from turnwise.algorithms.normalization import Scores, group_statistics
from turnwise.algorithms.response_tokens import Array, Index
from turnwise.algorithms.score_estimator import Outcomes, ScoreEstimator
from turnwise.spec import ESTIMATORS


class RLOO(ScoreEstimator):
    """A = the score minus the mean of the other siblings', on every trained token."""

    facts = ESTIMATORS["rloo"]

    def transform(self, outcomes: Outcomes) -> Array:
        """The advantages [T] of the trajectories."""
        return leave_one_out(outcomes.scores, outcomes.groups, outcomes.weights)


def leave_one_out(scores: Scores, groups: Index, weights: Scores) -> Scores:
    """s_i − Σ_{j≠i} s_j / (n − 1) of n siblings, all [T]; a group of one gives 0.

    It is computed as n/(n − 1)·(s_i − μ), which also holds where the n runs are weighted trajectories.

    >>> leave_one_out(np.array([1.0, 0, 0, 1, 7]), np.array([0, 0, 0, 0, 1]), np.ones(5)).round(6).tolist()
    [0.666667, -0.666667, -0.666667, 0.666667, 0.0]
    """
    mean, _, num_runs = group_statistics(scores, groups, weights)
    others = np.where(num_runs > 1.0, num_runs - 1.0, 1.0)
    return np.where(num_runs > 1.0, (scores - mean) * num_runs / others, 0.0)
