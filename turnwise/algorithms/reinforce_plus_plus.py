"""REINFORCE++ and its form with a baseline (Hu 2025, arXiv:2501.03262): no critic, and advantages whitened over the batch."""

from __future__ import annotations

import numpy as np

from turnwise.algorithms.normalization import group_statistics
from turnwise.algorithms.reinforce import Reinforce
from turnwise.algorithms.response_tokens import Array
from turnwise.algorithms.score_estimator import ScoreEstimator, TrajectoryScores
from turnwise.spec import ESTIMATORS


class ReinforcePlusPlus(Reinforce):
    """A_t = Σ_{k≥t} γ^{k−t} r_k with the score on the last token, whitened over the tokens of the batch."""

    spec = ESTIMATORS["reinforce_plus_plus"]


class ReinforcePlusPlusBaseline(ScoreEstimator):
    """A = s − μ over the siblings of a task, on every trained token, whitened over the tokens of the batch."""

    spec = ESTIMATORS["reinforce_plus_plus_baseline"]

    def transform(self, outcomes: TrajectoryScores) -> Array:
        """The centred scores [T]; whitening follows."""
        mean, _, num_runs = group_statistics(outcomes.scores, outcomes.groups, outcomes.weights)
        return np.where(num_runs > 1.0, outcomes.scores - mean, 0.0)
