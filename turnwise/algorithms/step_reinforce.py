"""REINFORCE on step returns: each turn is compared with all turns of its siblings."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.algorithms.advantages import clip, summary
from turnwise.algorithms.estimator import weights_of
from turnwise.algorithms.normalization import group_ids
from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.step_estimator import StepEstimator
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, Metric


class StepReinforce(StepEstimator):
    """A_k = G_k normalised by `reward_normalization`, by default (G_k − μ) / (σ + 1e-6) over all turns of a group."""

    spec = ESTIMATORS["step_reinforce"]

    def compare(self, groups: Sequence[Group], tokens: ResponseTokens, returns: Array) -> tuple[Array, list[Metric]]:
        """The advantages [K] of the turns."""
        ids, owner = group_ids(groups, self.normalizer.grouping), tokens.trajectory_of_turn
        normalized = self.normalizer(returns, ids[owner], weights_of(groups)[owner])
        advantages, metrics = clip("critic/step_reward_clip_frac", normalized, self.settings.reward_clip)
        return advantages, metrics + summary("critic/step_rewards", advantages)
