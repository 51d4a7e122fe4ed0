"""Credit on turns: one number each, on all their trained tokens."""

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

    r_j is what the tokens of turn j earned, less their β·KL and whitened where asked. It is the G_k that are normalised and
    held to ±`reward_clip`, by the subclass's `compare`. `reward_placement: final` puts the whole score on the last turn.
    """

    normalizes = "step returns"

    def token_rewards(self, groups: Sequence[Group], tokens: ResponseTokens) -> tuple[Array, list[Metric]]:
        """What each token earned [R], neither normalised nor clipped."""
        penalties, metrics = self.penalize(tokens)
        rewards = place_rewards(tokens, self.placement) - penalties
        return rewards, metrics + summary("critic/rewards", tokens.totals(rewards)[tokens.is_trained])

    def estimate(self, groups: Sequence[Group], tokens: ResponseTokens, rewards: Array) -> tuple[Array, list[Metric]]:
        """The advantages [R] of the tokens: their turn's."""
        steps = tokens.steps("turn")
        returns = discounted_sums(steps.sums(rewards), steps.lengths, self.settings.step_reward_gamma)
        advantages, metrics = self.compare(groups, tokens, returns)
        return advantages[steps.of_token], metrics

    @abstractmethod
    def compare(self, groups: Sequence[Group], tokens: ResponseTokens, returns: Array) -> tuple[Array, list[Metric]]:
        """The advantages [K] of the turns, whose step `returns` [K] are known, and what was measured."""
