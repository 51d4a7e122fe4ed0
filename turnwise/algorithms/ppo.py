"""Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv:1707.06347) and generalised advantage estimation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.algorithms.advantages import finish_advantages, summary
from turnwise.algorithms.controllers import KLController, make_kl_controller
from turnwise.algorithms.gae import gae
from turnwise.algorithms.kl_penalty import penalize_kl
from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.masks import whiten
from turnwise.algorithms.normalization import group_ids, resolve_normalizer
from turnwise.algorithms.response_tokens import ResponseTokens, final_rewards, turn_rewards
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.value_loss import ValueLoss
from turnwise.errors import ConfigError
from turnwise.protocols import Loss, Stateful
from turnwise.spec import ESTIMATORS
from turnwise.types import FloatArray, Group, Metric, samples_of

Array = NDArray[np.float64]


class PPO:
    """A = GAE(γ, λ) of token rewards against the critic's values, over response tokens or over turns; returns = A + V.

    Rewards, in this order: r_k on the last token of turn k (or the normalised score on the last of all, `reward_placement:
    final`), minus β·KL of each token, clipped to ±`reward_clip`, whitened. With `gae_granularity: turn` a turn is one
    decision: its rewards together, V at its first token, one advantage on all its tokens, γ and λ a turn.

    Raises:
        ConfigError: settings that contradict each other.
        NotAvailableError: a valid setting that isn't in this version.
    """

    needs: frozenset[str]
    loss: Loss
    value_loss: Loss | None
    running: Stateful | None

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        self.settings = settings
        self.placement = settings.reward_placement or ESTIMATORS["gae"].placement
        self.normalizer = resolve_normalizer(settings.reward_normalization, ESTIMATORS["gae"].normalization)
        if self.placement == "turn" and (self.normalizer.mean_type, self.normalizer.std_type) != ("none", "none"):
            raise ConfigError(
                "with reward_placement turn, adv_estimator gae works on single turn rewards, which can't be normalised; use "
                "reward_normalization.method identity, or reward_placement final"
            )
        if settings.add_token_level_kl and (self.normalizer.mean_type, self.normalizer.std_type) != ("none", "none"):
            raise ConfigError(
                "adv_estimator gae takes the KL off token rewards, and reward_normalization is of whole scores: the KL can't "
                "be normalised with them. Use use_kl_loss instead of add_token_level_kl, or the method identity"
            )
        by_turn = settings.gae_granularity == "turn"
        self.lambd = settings.lambd if settings.lambd is not None else (0.95 if by_turn else 1.0)
        self.running = self.normalizer.running
        self.controller = kl_controller or make_kl_controller(settings.init_kl_coef, settings.target_kl, settings.kl_horizon)
        self.loss = PolicyLoss(settings)
        self.value_loss = ValueLoss(settings)
        self.needs = settings.needs | {"values"}

    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        """Writes `advantages` and `returns` into every sample of the groups.

        Raises:
            ValueError: a forward pass that credit needs hasn't run.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        tokens = ResponseTokens.of(trajectories)
        penalties, metrics = penalize_kl(trajectories, self.settings, self.controller)
        rewards = self._rewards(groups, tokens)
        rewards -= tokens.gather([array for arrays in penalties for array in arrays])
        rewards, clipped = self._bounded(rewards)
        totals = np.array([part.sum() for part in np.split(rewards, tokens.ends + 1)[:-1]], dtype=np.float64)
        if self.settings.whiten_rewards:
            rewards = whiten(torch.from_numpy(rewards), torch.ones(len(rewards), dtype=torch.bool)).numpy()
        scores = np.array([trajectory.score for trajectory in trajectories], dtype=np.float64)
        metrics += [*clipped, *summary("critic/score", scores), *summary("critic/rewards", totals)]
        metrics += self._estimate(tokens, rewards)
        return metrics + finish_advantages(samples_of(groups), self.settings)

    def _rewards(self, groups: Sequence[Group], tokens: ResponseTokens) -> Array:
        """Rewards of the tokens [R], before any KL."""
        if self.placement == "turn":
            return turn_rewards(tokens)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        scores = np.array([trajectory.score for trajectory in trajectories], dtype=np.float64)
        weights = np.array([trajectory.weight for trajectory in trajectories], dtype=np.float64)
        normalized = self.normalizer(scores, group_ids(groups, self.normalizer.grouping), weights)
        return final_rewards(tokens, normalized[tokens.kept])

    def _bounded(self, rewards: Array) -> tuple[Array, list[Metric]]:
        bound = self.settings.reward_clip
        if bound is None or not len(rewards):
            return rewards, []
        share = float((np.abs(rewards) > bound).mean())
        return rewards.clip(-bound, bound), [Metric("critic/token_reward_clip_frac", share, weight=len(rewards))]

    def _estimate(self, tokens: ResponseTokens, rewards: Array) -> list[Metric]:
        """GAE over the steps of the tokens; writes advantages and returns into the samples."""
        steps = tokens.steps(self.settings.gae_granularity)
        values = tokens.gather(_known([sample.values for sample in tokens.samples]))[steps.first]
        after = tokens.gather(_known([sample.next_values for sample in tokens.samples]))[tokens.ends]
        is_cut = np.array([trajectory.bootstraps for trajectory in tokens.trajectories], dtype=bool)
        advantages, returns = gae(
            np.bincount(steps.of_token, rewards, len(steps.first)).astype(np.float64),
            values,
            steps.lengths,
            self.settings.gamma,
            self.lambd,
            last_values=np.where(is_cut & self.settings.bootstrap_on_truncation, after, 0.0),
        )
        for sample, array in zip(tokens.samples, tokens.scatter(advantages[steps.of_token]), strict=True):
            sample.advantages = array
        for sample, array in zip(tokens.samples, tokens.scatter(returns[steps.of_token]), strict=True):
            sample.returns = array
        return [*summary("critic/values", values), *summary("critic/returns", returns), *explained_variance(values, returns)]


def _known(arrays: Sequence[FloatArray | None]) -> list[FloatArray]:
    known = [array for array in arrays if array is not None]
    if len(known) < len(arrays):
        raise ValueError("adv_estimator gae needs values on every sample before credit: the critic's forward pass hasn't run")
    return known


def explained_variance(values: Array, returns: Array) -> list[Metric]:
    """1 − Var(R − V) / Var(R): 1 where the critic knows the returns, 0 where a constant would do as well; nothing where all
    returns are the same."""
    variance = float(returns.var()) if len(returns) else 0.0
    if variance <= 1e-12:
        return []
    return [Metric("critic/explained_variance", 1.0 - float((returns - values).var()) / variance, weight=len(returns))]
