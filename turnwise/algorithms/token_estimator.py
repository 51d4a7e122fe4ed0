"""Estimators that place rewards on single response tokens, and compute advantages from the returns of these
rewards."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from turnwise.algorithms.advantages import clip, summary, whiten_all, write_advantages
from turnwise.algorithms.estimator import Estimator, tokens_of
from turnwise.algorithms.kl import KLController
from turnwise.algorithms.losses import ValueLoss
from turnwise.algorithms.normalization import group_ids
from turnwise.algorithms.response_tokens import (
    Array,
    ResponseTokens,
    RewardPlacement,
    discounted_sums,
    final_rewards,
    gae,
    place_rewards,
)
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.errors import ConfigError
from turnwise.spec import ESTIMATORS
from turnwise.types import FloatArray, Group, Metric, Trajectory


class TokenEstimator(Estimator):
    """Base of the estimators on token rewards; a subclass's `estimate` turns rewards into advantages. Rewards
    are made in this order: r_k on the last token of turn k, or the score s on the trajectory's last token
    (`reward_placement: final`); minus β·KL of each token; clip to ±`reward_clip`; whitening with
    `whiten_rewards`. If s is normalised, β·ΣKL is subtracted from s before the normalisation, and nothing
    from single tokens."""

    normalizes: ClassVar[Literal["scores", "step returns"]] = "scores"
    """What `reward_normalization` normalises. Scores are normalised only with `reward_placement: final`,
    never turn by turn."""
    reward_placement: RewardPlacement

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        super().__init__(settings, kl_controller)
        default_placement: RewardPlacement = "final" if self.spec.reward_placement == "final" else "turn"
        self.reward_placement = settings.reward_placement or default_placement
        normalizes_scores = self.normalizes == "scores" and not self.normalizer.is_identity
        if normalizes_scores and self.reward_placement == "turn":
            raise ConfigError(
                f"with reward_placement turn, adv_estimator {settings.adv_estimator} works on single turn "
                "rewards, which can't be normalised; use reward_normalization.method identity, or "
                "reward_placement final"
            )

    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        tokens = tokens_of(groups)
        rewards, metrics = self.token_rewards(groups, tokens)
        if self.settings.whiten_rewards:
            rewards = whiten_all(rewards)
        advantages, estimate_metrics = self.estimate(groups, tokens, rewards)
        metrics += summary("critic/score", tokens.scores)
        metrics += estimate_metrics
        return metrics + write_advantages(tokens, advantages, self.settings)

    def token_rewards(self, groups: Sequence[Group], tokens: ResponseTokens) -> tuple[Array, list[Metric]]:
        """The reward of each token [R], not yet whitened, and metrics."""
        penalties, metrics = self.penalize(tokens)
        if self.normalizer.is_identity:
            rewards = place_rewards(tokens, self.reward_placement) - penalties
        else:
            scores = tokens.scores - tokens.totals(penalties)
            ids = group_ids(groups, self.normalizer.grouping)
            normalized = self.normalizer(scores, ids, tokens.weights)
            rewards = final_rewards(tokens, normalized)
        rewards, clip_metrics = clip("critic/token_reward_clip_frac", rewards, self.settings.reward_clip)
        totals = tokens.totals(rewards)[tokens.is_trained]
        metrics += clip_metrics
        metrics += summary("critic/rewards", totals)
        return rewards, metrics

    @abstractmethod
    def estimate(
        self,
        groups: Sequence[Group],
        tokens: ResponseTokens,
        rewards: Array,
    ) -> tuple[Array, list[Metric]]:
        """The advantages [R] from the tokens' `rewards` [R], and metrics."""


class Reinforce(TokenEstimator):
    """REINFORCE (Williams 1992): A_t = Σ_{k≥t} γ^{k−t} r_k over the response tokens of a trajectory, turn
    after turn."""

    spec = ESTIMATORS["reinforce"]

    def estimate(
        self,
        groups: Sequence[Group],
        tokens: ResponseTokens,
        rewards: Array,
    ) -> tuple[Array, list[Metric]]:
        return discounted_sums(rewards, tokens.lengths, self.settings.gamma), []


class AgenticReinforce(TokenEstimator):
    """REINFORCE on turns: every token of turn k has the advantage A_k = (Σ rewards inside turn k) +
    γA_{k+1}."""

    spec = ESTIMATORS["agentic_reinforce"]

    def estimate(
        self,
        groups: Sequence[Group],
        tokens: ResponseTokens,
        rewards: Array,
    ) -> tuple[Array, list[Metric]]:
        steps = tokens.steps("turn")
        returns = discounted_sums(steps.sums(rewards), steps.lengths, self.settings.gamma)
        return returns[steps.of_token], []


class ReinforcePlusPlus(Reinforce):
    """A_t of `Reinforce`, whitened. By default the score is the reward of the last token (Hu 2025,
    arXiv:2501.03262)."""

    spec = ESTIMATORS["reinforce_plus_plus"]


class ReMax(TokenEstimator):
    """A_t = Σ_{k≥t} γ^{k−t} r_k − the score of a greedy sibling that isn't trained on (Li et al. 2023,
    arXiv:2310.10505).

    The greedy score is clipped by `reward_clip` like the rewards, so that A_0 = 0 for an episode with the
    same rewards (γ = 1). No KL is subtracted from it, since the greedy episode has no reference log-probs.
    Raises ConfigError with `whiten_rewards`, which would make the rewards and the greedy score
    incomparable."""

    spec = ESTIMATORS["remax"]

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        super().__init__(settings, kl_controller)
        if settings.whiten_rewards:
            raise ConfigError(
                "whiten_rewards moves the rewards that adv_estimator remax compares with the score of a "
                "greedy sibling; use whiten_advantages, or remove it"
            )

    def estimate(
        self,
        groups: Sequence[Group],
        tokens: ResponseTokens,
        rewards: Array,
    ) -> tuple[Array, list[Metric]]:
        baselines = np.array([self._baseline(group) for group in groups], dtype=np.float64)
        of_trajectory = baselines[group_ids(groups)]
        of_token = np.repeat(of_trajectory, tokens.lengths)
        return discounted_sums(rewards, tokens.lengths, self.settings.gamma) - of_token, []

    def _baseline(self, group: Group) -> float:
        if group.greedy is None:
            raise ValueError(
                f"adv_estimator remax subtracts the score of a greedy sibling, and group {group.index} (task "
                f"{group.task.id}) has none in `greedy`: the rollout must add one"
            )
        bound = self.settings.reward_clip or np.inf
        rewards = rewards_by_turn(group.greedy)
        if self.reward_placement == "final":
            rewards = [group.greedy.score]
        return float(np.clip(rewards, -bound, bound).sum())


def rewards_by_turn(trajectory: Trajectory) -> list[float]:
    """The reward of each turn; the last one includes the rewards of the whole episode (`outcome_rewards`)."""
    rewards = [turn.reward for turn in trajectory.turns] or [0.0]
    rewards[-1] += sum(trajectory.outcome_rewards.values())
    return rewards


class PPO(TokenEstimator):
    """A = GAE(γ, λ) of token rewards and the critic's values V, over response tokens; returns = A + V
    (Schulman et al. 2017, arXiv:1707.06347). `credit` also writes `returns`. With `gae_granularity: turn` a
    turn is one decision: it has the sum of its rewards, V at its first token and one advantage for all its
    tokens, and γ and λ are per turn."""

    spec = ESTIMATORS["gae"]

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        super().__init__(settings, kl_controller)
        default_lambd = 0.95 if settings.gae_granularity == "turn" else 1.0
        self.lambd = default_lambd if settings.lambd is None else settings.lambd
        self.value_loss = ValueLoss(settings)

    def estimate(
        self,
        groups: Sequence[Group],
        tokens: ResponseTokens,
        rewards: Array,
    ) -> tuple[Array, list[Metric]]:
        steps = tokens.steps(self.settings.gae_granularity)
        value_of_token = _gathered(tokens, [sample.values for sample in tokens.samples])
        values = value_of_token[steps.first]
        advantages, returns = gae(
            steps.sums(rewards),
            values,
            steps.lengths,
            self.settings.gamma,
            self.lambd,
            last_values=self._last_values(tokens),
        )
        return_arrays = tokens.scatter(returns[steps.of_token])
        for sample, array in zip(tokens.samples, return_arrays, strict=True):
            sample.returns = array
        metrics = summary("critic/values", values)
        metrics += summary("critic/returns", returns)
        metrics += explained_variance(values, returns)
        return advantages[steps.of_token], metrics

    def _last_values(self, tokens: ResponseTokens) -> Array:
        """The value of each trajectory's last state [T] if the trajectory `bootstraps` and the settings allow
        it, else 0."""
        next_values = _gathered(tokens, [sample.next_values for sample in tokens.samples])
        last_values = np.zeros(len(tokens.trajectories))
        last_values[tokens.is_trained] = next_values[tokens.ends]
        is_cut = np.array([trajectory.bootstraps for trajectory in tokens.trajectories], dtype=bool)
        is_bootstrapped = is_cut & self.settings.bootstrap_on_truncation
        return np.where(is_bootstrapped, last_values, 0.0)


def _gathered(tokens: ResponseTokens, arrays: Sequence[FloatArray | None]) -> Array:
    values = tokens.gather(arrays)
    if values is None:
        raise ValueError(
            "adv_estimator gae needs values on every sample before credit: the critic's forward pass "
            "hasn't run"
        )
    return values


def explained_variance(values: Array, returns: Array) -> list[Metric]:
    """1 − Var(R − V) / Var(R), with returns R and values V: 1 for a perfect critic, 0 for a constant one. No
    metric if all returns are equal."""
    variance = float(returns.var()) if len(returns) else 0.0
    if variance <= 1e-12:
        return []
    unexplained = float((returns - values).var()) / variance
    return [Metric("critic/explained_variance", 1.0 - unexplained, weight=len(returns))]
