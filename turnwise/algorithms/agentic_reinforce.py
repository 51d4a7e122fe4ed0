"""REINFORCE on turns: a turn's tokens get its whole reward, and discounting is by turn instead of by token."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.algorithms.gae import discounted_sums
from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.token_estimator import TokenEstimator
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, Metric


class AgenticReinforce(TokenEstimator):
    """C_k = Σ rewards inside turn k + γC_{k+1}, the same on every token of turn k."""

    spec = ESTIMATORS["agentic_reinforce"]

    def estimate(self, groups: Sequence[Group], tokens: ResponseTokens, rewards: Array) -> tuple[Array, list[Metric]]:
        """The return of each token's turn [R]."""
        steps = tokens.steps("turn")
        return discounted_sums(steps.sums(rewards), steps.lengths, self.settings.gamma)[steps.of_token], []
