"""Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv:1707.06347) and generalised advantage estimation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.algorithms.advantages import summary
from turnwise.algorithms.controllers import KLController
from turnwise.algorithms.gae import gae
from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.token_estimator import TokenEstimator
from turnwise.algorithms.value_loss import ValueLoss
from turnwise.spec import ESTIMATORS
from turnwise.types import FloatArray, Group, Metric


class PPO(TokenEstimator):
    """A = GAE(γ, λ) of token rewards against the critic's values, over response tokens or over turns; returns = A + V.

    With `gae_granularity: turn` a turn is one decision: the sum of its rewards, V at its first token, one advantage for all its
    tokens, γ and λ per turn.
    """

    spec = ESTIMATORS["gae"]

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        super().__init__(settings, kl_controller)
        self.lambd = settings.lambd if settings.lambd is not None else (0.95 if settings.gae_granularity == "turn" else 1.0)
        self.value_loss = ValueLoss(settings)

    def estimate(self, groups: Sequence[Group], tokens: ResponseTokens, rewards: Array) -> tuple[Array, list[Metric]]:
        """GAE over the steps of the tokens; writes their `returns` into the samples.

        Raises:
            ValueError: the critic's forward pass hasn't run.
        """
        steps = tokens.steps(self.settings.gae_granularity)
        values = _gathered(tokens, [sample.values for sample in tokens.samples])[steps.first]
        advantages, returns = gae(
            steps.sums(rewards), values, steps.lengths, self.settings.gamma, self.lambd, last_values=self._last_values(tokens)
        )
        for sample, array in zip(tokens.samples, tokens.scatter(returns[steps.of_token]), strict=True):
            sample.returns = array
        measured = [*summary("critic/values", values), *summary("critic/returns", returns)]
        return advantages[steps.of_token], [*measured, *explained_variance(values, returns)]

    def _last_values(self, tokens: ResponseTokens) -> Array:
        """The value of each trajectory's last state [T]: 0 unless the trajectory was cut from outside."""
        after = np.zeros(len(tokens.trajectories))
        after[tokens.is_trained] = _gathered(tokens, [sample.next_values for sample in tokens.samples])[tokens.ends]
        is_cut = np.array([trajectory.bootstraps for trajectory in tokens.trajectories], dtype=bool)
        return np.where(is_cut & self.settings.bootstrap_on_truncation, after, 0.0)


def _gathered(tokens: ResponseTokens, arrays: Sequence[FloatArray | None]) -> Array:
    found = tokens.gather(arrays)
    if found is None:
        raise ValueError("adv_estimator gae needs values on every sample before credit: the critic's forward pass hasn't run")
    return found


def explained_variance(values: Array, returns: Array) -> list[Metric]:
    """1 − Var(R − V) / Var(R): 1 if the critic knows the returns, 0 if it is no better than a constant; no metric if all
    returns are equal."""
    variance = float(returns.var()) if len(returns) else 0.0
    if variance <= 1e-12:
        return []
    return [Metric("critic/explained_variance", 1.0 - float((returns - values).var()) / variance, weight=len(returns))]
