"""Credit on turns: one number per turn, on all its trained tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from turnwise.algorithms.advantages import summary
from turnwise.algorithms.gae import discounted_sums
from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.reward_placement import place_rewards
from turnwise.algorithms.token_estimator import TokenEstimator
from turnwise.types import Group, Metric


class StepEstimator(TokenEstimator):
    """Base of the estimators on step returns G_k = Σ_{j≥k} γ_s^{j−k} r_j over the K turns with a trained token.

    r_j is the reward of turn j's tokens minus their β·KL, whitened if asked. The subclass's `compare` normalises the G_k and
    clips them to ±`reward_clip`. `reward_placement: final` puts the whole score on the last turn.
    """

    normalizes = "step returns"

    def token_rewards(self, groups: Sequence[Group], tokens: ResponseTokens) -> tuple[Array, list[Metric]]:
        """The reward of each token [R], neither normalised nor clipped."""
        penalties, metrics = self.penalize(tokens)
        rewards = place_rewards(tokens, self.placement) - penalties
        return rewards, metrics + summary("critic/rewards", tokens.totals(rewards)[tokens.is_trained])

    def estimate(self, groups: Sequence[Group], tokens: ResponseTokens, rewards: Array) -> tuple[Array, list[Metric]]:
        """The advantages [R] of the tokens, equal to their turn's."""
        steps = tokens.steps("turn")
        returns = discounted_sums(steps.sums(rewards), steps.lengths, self.settings.step_reward_gamma)
        advantages, metrics = self.compare(groups, tokens, returns)
        return advantages[steps.of_token], metrics

    @abstractmethod
    def compare(self, groups: Sequence[Group], tokens: ResponseTokens, returns: Array) -> tuple[Array, list[Metric]]:
        """The advantages [K] of the turns from their step `returns` [K], and metrics."""
