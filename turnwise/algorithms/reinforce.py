"""REINFORCE on token rewards (Williams 1992)."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.algorithms.gae import discounted_sums
from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.token_estimator import TokenEstimator
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, Metric


class Reinforce(TokenEstimator):
    """A_t = Σ_{k≥t} γ^{k−t} r_k over the response tokens of a trajectory, turn after turn."""

    spec = ESTIMATORS["reinforce"]

    def estimate(self, groups: Sequence[Group], tokens: ResponseTokens, rewards: Array) -> tuple[Array, list[Metric]]:
        """The returns [R] of the tokens."""
        return discounted_sums(rewards, tokens.lengths, self.settings.gamma), []
