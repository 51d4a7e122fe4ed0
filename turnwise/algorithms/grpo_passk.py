"""GRPO for pass@k: only the best of a group is rewarded (Tang et al. 2025, arXiv:2503.19595)."""

from __future__ import annotations

import numpy as np

from turnwise.algorithms.normalization import MIN_STD, Scores, group_statistics
from turnwise.algorithms.response_tokens import Array, Index
from turnwise.algorithms.score_estimator import ScoreEstimator, TrajectoryScores
from turnwise.errors import ConfigError
from turnwise.spec import ESTIMATORS


class GRPOPassK(ScoreEstimator):
    """A = how far the best sibling is above the second, in deviations; 0 for all others."""

    spec = ESTIMATORS["grpo_passk"]

    def transform(self, outcomes: TrajectoryScores) -> Array:
        """The advantages [T] of the trajectories."""
        return best_above_second(outcomes.scores, outcomes.groups, outcomes.weights, outcomes.runs)


def best_above_second(scores: Scores, groups: Index, weights: Scores, runs: Index) -> Scores:
    """(s_max − s_second) / (σ + 1e-6) for the best run of each group, 0 for the others and where the best are equal. All [T].

    A run's score is its trajectories' mean; one that weighs nothing is neither best nor second.

    Raises:
        ConfigError: a group of one, which has no second.

    >>> best_above_second(np.array([1.0, 0.5, 0]), np.zeros(3, int), np.ones(3), np.arange(3)).round(5).tolist()
    [1.0, 0.0, 0.0]
    """
    _, run = np.unique(runs, return_inverse=True)
    run_weights = np.bincount(run, weights)
    run_scores = np.bincount(run, weights * scores) / np.where(run_weights > 0, run_weights, 1.0)
    _, std, _ = group_statistics(scores, groups, weights)
    result = np.zeros_like(scores)
    for members in np.split(np.argsort(groups, kind="stable"), np.flatnonzero(np.diff(np.sort(groups))) + 1):
        candidates = np.unique(run[members])
        if len(candidates) < 2:
            raise ConfigError(
                "adv_estimator grpo_passk compares the best of a group with its second, and a group of 1 has none; set "
                "train_env_manager.group_size to at least 2"
            )
        candidates = candidates[run_weights[candidates] > 0]
        if len(candidates) < 2 or std[members[0]] <= MIN_STD:
            continue
        second, best = candidates[np.argsort(run_scores[candidates], kind="stable")[-2:]]
        winners = members[run[members] == best]
        result[winners] = (run_scores[best] - run_scores[second]) / (std[winners] + MIN_STD)
    return result
