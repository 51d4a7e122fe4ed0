"""Credit on whole trajectories: one number per trajectory, on all its trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.algorithms.advantages import clip, summary, write_advantages
from turnwise.algorithms.estimator import Estimator, scores_of, tokens_of, weights_of
from turnwise.algorithms.normalization import Scores, group_ids
from turnwise.algorithms.response_tokens import Array, Index
from turnwise.types import Group, Metric


@dataclass(frozen=True, slots=True)
class TrajectoryScores:
    """The input of a transform of scores: one entry for each of T trajectories."""

    scores: Scores
    """Scores minus the KL penalty."""
    groups: Index
    """The comparison group of each: siblings of a task, unless `reward_normalization.grouping` says otherwise."""
    weights: Scores
    """Weights; those of one run's trajectories add up to 1."""
    lengths: Index
    """Trained tokens."""
    runs: Index
    """The run of each trajectory; several trajectories may share one."""


class ScoreEstimator(Estimator):
    """Base of the estimators on trajectory scores; a subclass defines `transform`.

    In this order: s ← s − β·ΣKL, `transform`, clip to ±`reward_clip`; the same on all trained tokens of a trajectory, however
    many contexts they lie in; whitening, clip to ±`advantage_clip`. Statistics are over trajectories, never over tokens, so
    long episodes don't weigh more in them.
    """

    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        """Writes `advantages` into every sample of the groups; failed trajectories are not among them."""
        tokens = tokens_of(groups)
        penalties, metrics = self.penalize(tokens)
        scores = scores_of(groups)
        outcomes = TrajectoryScores(
            scores=scores - tokens.totals(penalties),
            groups=group_ids(groups, self.normalizer.grouping),
            weights=weights_of(groups),
            lengths=tokens.lengths,
            runs=runs_of(groups),
        )
        rewards, clipped = clip("critic/reward_clip_frac", self.transform(outcomes), self.settings.reward_clip)
        metrics += [*clipped, *summary("critic/score", scores), *summary("critic/rewards", rewards)]
        return metrics + write_advantages(tokens, np.repeat(rewards, tokens.lengths), self.settings)

    def transform(self, outcomes: TrajectoryScores) -> Array:
        """The advantages [T] of the trajectories: their scores as `reward_normalization` says."""
        return self.normalizer(outcomes.scores, outcomes.groups, outcomes.weights)


def runs_of(groups: Sequence[Group]) -> Index:
    """The run of each trajectory [T]: its own if it weighs 1, else the run of its sibling number in the group."""
    runs: dict[tuple[int, int, int], int] = {}
    found = []
    for index, group in enumerate(groups):
        for number, trajectory in enumerate(group.trajectories):
            run = (index, trajectory.sibling, number if trajectory.weight >= 1.0 else -1)
            found.append(runs.setdefault(run, len(runs)))
    return np.array(found, np.int64)
