"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

import numpy as np

from turnwise.algorithms.normalization import Scores
from turnwise.algorithms.response_tokens import Array, Index
from turnwise.algorithms.score_estimator import ScoreEstimator, TrajectoryScores
from turnwise.spec import ESTIMATORS


class RLOO(ScoreEstimator):
    """A = the score minus the mean score of the other siblings, on every trained token."""

    spec = ESTIMATORS["rloo"]

    def transform(self, outcomes: TrajectoryScores) -> Array:
        """The advantages [T] of the trajectories."""
        return leave_one_out(outcomes.scores, outcomes.groups, outcomes.weights, outcomes.runs)


def leave_one_out(scores: Scores, groups: Index, weights: Scores, runs: Index) -> Scores:
    """s_i − the weighted mean score of the siblings of other runs, all [T]; 0 where there are none.

    A whole run is left out: if its other trajectories stayed, the baseline would depend on what the run did.

    >>> leave_one_out(np.array([1.0, 0, 0, 1, 7]), np.array([0, 0, 0, 0, 1]), np.ones(5), np.arange(5)).round(6).tolist()
    [0.666667, -0.666667, -0.666667, 0.666667, 0.0]
    """
    _, group = np.unique(groups, return_inverse=True)
    _, run = np.unique(runs, return_inverse=True)
    others, total = (np.bincount(group, x)[group] - np.bincount(run, x)[run] for x in (weights, weights * scores))
    has_others = others > 1e-9  # thirds and sixths add up to 1 only nearly
    return np.where(has_others, scores - total / np.where(has_others, others, 1.0), 0.0)
