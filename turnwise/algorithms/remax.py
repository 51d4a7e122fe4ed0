"""ReMax: a greedy episode of the same task is the baseline (Li et al. 2023, arXiv:2310.10505)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.algorithms.controllers import KLController
from turnwise.algorithms.estimator import groups_of
from turnwise.algorithms.gae import discounted_sums
from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.token_estimator import TokenEstimator
from turnwise.errors import ConfigError
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, Metric, Trajectory


class ReMax(TokenEstimator):
    """A_t = Σ_{k≥t} γ^{k−t} r_k − the score of the group's greedy sibling, which isn't trained on.

    That score is clipped by `reward_clip` like the rewards, so that equal episodes have an advantage of 0. No KL is subtracted
    from it: the greedy episode has no log-probs.

    Raises:
        ConfigError: `whiten_rewards`, after which rewards and that score could not be compared.
    """

    spec = ESTIMATORS["remax"]

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        super().__init__(settings, kl_controller)
        if settings.whiten_rewards:
            raise ConfigError(
                "whiten_rewards moves the rewards that adv_estimator remax compares with the score of a greedy sibling; use "
                "whiten_advantages, or remove it"
            )

    def estimate(self, groups: Sequence[Group], tokens: ResponseTokens, rewards: Array) -> tuple[Array, list[Metric]]:
        """The returns [R] of the tokens above their group's baseline.

        Raises:
            ValueError: a group has no greedy sibling.
        """
        baselines = np.array([self._baseline(group) for group in groups], dtype=np.float64)
        of_token = np.repeat(baselines[groups_of(groups)], tokens.lengths)
        returns = discounted_sums(rewards, tokens.lengths, self.settings.gamma)
        return returns - of_token, []

    def _baseline(self, group: Group) -> float:
        if group.greedy is None:
            raise ValueError(
                f"adv_estimator remax subtracts the score of a greedy sibling, and group {group.index} (task {group.task.id}) "
                "has none in `greedy`: the rollout must add one"
            )
        bound = self.settings.reward_clip or np.inf
        rewards = [group.greedy.score] if self.placement == "final" else rewards_by_turn(group.greedy)
        return float(np.clip(rewards, -bound, bound).sum())


def rewards_by_turn(trajectory: Trajectory) -> list[float]:
    """The reward of each turn; the last turn's includes the episode's."""
    rewards = [turn.reward for turn in trajectory.turns] or [0.0]
    rewards[-1] += sum(trajectory.outcome_rewards.values())
    return rewards
