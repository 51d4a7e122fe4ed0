"""Group-in-group policy optimisation (Feng et al. 2025, arXiv:2505.10978)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.algorithms.advantages import clip, summary
from turnwise.algorithms.controllers import KLController
from turnwise.algorithms.estimator import groups_of, scores_of, weights_of
from turnwise.algorithms.normalization import group_ids, resolve_normalizer
from turnwise.algorithms.response_tokens import Array, Index, ResponseTokens
from turnwise.algorithms.running import RunningParts
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.state_buckets import bucket_metrics, state_buckets
from turnwise.algorithms.step_estimator import StepEstimator
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, Metric


class GiGPO(StepEstimator):
    """A_k = w_E·A^E + w_S·A^S_k, on every trained token of turn k.

    A^E: scores normalised over the trajectories of a group, as in GRPO. A^S: step returns normalised by the same method over
    the turns of one task group that were taken in the same state; 0 for a turn that is alone in its state. Both are held to
    ±`reward_clip`. `reward_normalization.grouping` is A^E's: a bucket never leaves its group.

    Raises:
        ConfigError: a `reward_normalization` that takes no mean.
    """

    spec = ESTIMATORS["gigpo"]

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        super().__init__(settings, kl_controller)
        self.step_normalizer = resolve_normalizer(settings.reward_normalization, self.spec.normalization)
        if self.normalizer.running and self.step_normalizer.running:
            self.running = RunningParts({"episode": self.normalizer.running, "step": self.step_normalizer.running})

    def compare(self, groups: Sequence[Group], tokens: ResponseTokens, returns: Array) -> tuple[Array, list[Metric]]:
        """The advantages [K] of the turns.

        Raises:
            ValueError: a turn has no `state_key`.
        """
        owner = tokens.trajectory_of_turn
        of_episodes, metrics = self._episode_advantages(groups, tokens)
        buckets = state_buckets(tokens, groups_of(groups)[owner])
        of_steps, measured = self._step_advantages(returns, buckets, weights_of(groups)[owner])
        advantages = self.settings.episode_reward_weight * of_episodes[owner] + self.settings.step_reward_weight * of_steps
        return advantages, [*metrics, *measured, *bucket_metrics(tokens, groups_of(groups)[owner], buckets)]

    def _episode_advantages(self, groups: Sequence[Group], tokens: ResponseTokens) -> tuple[Array, list[Metric]]:
        """A^E of the trajectories [T]."""
        penalties = np.array([trajectory.score_kl_penalty for trajectory in tokens.trajectories], dtype=np.float64)
        ids = group_ids(groups, self.normalizer.grouping)
        normalized = self.normalizer(scores_of(groups) - penalties, ids, weights_of(groups))
        advantages, metrics = clip("critic/reward_clip_frac", normalized, self.settings.reward_clip)
        return advantages, metrics + summary("critic/episode_rewards", advantages)

    def _step_advantages(self, returns: Array, buckets: Index, weights: Array) -> tuple[Array, list[Metric]]:
        """A^S of the turns [K]."""
        normalized = self.step_normalizer(returns, buckets, weights)
        advantages, metrics = clip("critic/step_reward_clip_frac", normalized, self.settings.reward_clip)
        return advantages, metrics + summary("critic/step_rewards", advantages)
