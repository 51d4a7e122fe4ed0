"""Estimators on turns: all trained tokens of a turn get the same advantage."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from turnwise.algorithms.advantages import clip, summary
from turnwise.algorithms.kl import KLController
from turnwise.algorithms.normalization import RunningParts, factorize, group_ids, resolve_normalizer
from turnwise.algorithms.response_tokens import Array, Index, ResponseTokens, discounted_sums, place_rewards
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.token_estimator import TokenEstimator
from turnwise.errors import EnvironmentFault
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, Metric, Turn


class StepEstimator(TokenEstimator):
    """Base of the estimators on step returns G_k = Σ_{j≥k} γ_s^{j−k} r_j over a trajectory's turns with
    trained tokens; γ_s is `step_reward_gamma`. r_j sums the rewards of turn j's tokens, from which β·KL is
    subtracted first; with `whiten_rewards` they are also whitened. `reward_placement: final` puts the whole
    score on the last turn. A subclass's `compare` turns the G_k into advantages. Here the advantages, not the
    rewards, are clipped to ±`reward_clip`."""

    normalizes = "step returns"

    def token_rewards(self, groups: Sequence[Group], tokens: ResponseTokens) -> tuple[Array, list[Metric]]:
        penalties, metrics = self.penalize(tokens)
        rewards = place_rewards(tokens, self.reward_placement) - penalties
        totals = tokens.totals(rewards)[tokens.is_trained]
        return rewards, metrics + summary("critic/rewards", totals)

    def estimate(
        self,
        groups: Sequence[Group],
        tokens: ResponseTokens,
        rewards: Array,
    ) -> tuple[Array, list[Metric]]:
        steps = tokens.steps("turn")
        step_rewards = steps.sums(rewards)
        returns = discounted_sums(step_rewards, steps.lengths, self.settings.step_reward_gamma)
        advantages, metrics = self.compare(groups, tokens, returns)
        return advantages[steps.of_token], metrics

    @abstractmethod
    def compare(
        self,
        groups: Sequence[Group],
        tokens: ResponseTokens,
        returns: Array,
    ) -> tuple[Array, list[Metric]]:
        """The advantages [K] of the turns from their step `returns` [K], and metrics."""

    def _bounded(self, kind: Literal["step", "episode"], advantages: Array) -> tuple[Array, list[Metric]]:
        """Advantages clipped to ±`reward_clip`. Metrics: the clipped share, and a summary as
        `critic/{kind}_rewards/…`."""
        share = "critic/step_reward_clip_frac" if kind == "step" else "critic/reward_clip_frac"
        bounded, metrics = clip(share, advantages, self.settings.reward_clip)
        return bounded, metrics + summary(f"critic/{kind}_rewards", bounded)


class StepReinforce(StepEstimator):
    """A_k = G_k normalised by `reward_normalization`, by default (G_k − μ) / (σ + 1e-6) over all turns of a
    group."""

    spec = ESTIMATORS["step_reinforce"]

    def compare(
        self,
        groups: Sequence[Group],
        tokens: ResponseTokens,
        returns: Array,
    ) -> tuple[Array, list[Metric]]:
        ids = group_ids(groups, self.normalizer.grouping)
        owner = tokens.trajectory_of_turn
        advantages = self.normalizer(returns, ids[owner], tokens.weights[owner])
        return self._bounded("step", advantages)


def state_buckets(tokens: ResponseTokens, groups: Index) -> Index:
    """The index of each turn's bucket [K]. Turns with the same entry in `groups` [K] and the same state key
    share a bucket. Raises EnvironmentFault if a turn has no `state_key`."""
    keys = []
    for turn, group in zip(credited_turns(tokens), groups.tolist(), strict=True):
        if turn.state_key is None:
            raise EnvironmentFault(
                "adv_estimator gigpo compares turns that were taken in the same state, and a turn has no "
                f"state_key (its observation begins {turn.observation[:40]!r}); the agent loop must set it, "
                "as env_agent does"
            )
        keys.append((group, turn.state_key))
    return factorize(keys)


def bucket_metrics(tokens: ResponseTokens, groups: Index, buckets: Index) -> list[Metric]:
    """Sizes of the buckets, the share of buckets with one turn, and the share of *aliased* turns. `buckets`
    [K] are those of `state_buckets`. An aliased turn has the same entry in `groups` [K] and the same
    observation as a turn of another bucket."""
    if not len(buckets):
        return []
    sizes = np.bincount(buckets)
    observations = [turn.observation for turn in credited_turns(tokens)]
    keys = list(zip(groups.tolist(), observations, strict=True))
    buckets_of: dict[tuple[int, str], set[int]] = {}
    for key, bucket in zip(keys, buckets.tolist(), strict=True):
        buckets_of.setdefault(key, set()).add(bucket)
    num_aliased = sum(len(buckets_of[key]) > 1 for key in keys)
    return [
        Metric("critic/bucket_size/mean", float(sizes.mean()), weight=len(sizes)),
        Metric("critic/bucket_size/max", float(sizes.max()), "max"),
        Metric("critic/bucket_of_one", float((sizes == 1).mean()), weight=len(sizes)),
        Metric("critic/aliased_turns", num_aliased / len(buckets), weight=len(buckets)),
    ]


def credited_turns(tokens: ResponseTokens) -> Iterator[Turn]:
    """The K turns with a trained token."""
    owners = tokens.trajectory_of_turn.tolist()
    indices = tokens.turn_index.tolist()
    for owner, index in zip(owners, indices, strict=True):
        yield tokens.trajectories[owner].turns[index]


class GiGPO(StepEstimator):
    """A_k = w_E·A^E + w_S·A^S_k on every trained token of turn k (Feng et al. 2025, arXiv:2505.10978), with
    w_E = `episode_reward_weight` and w_S = `step_reward_weight`.

    A^E: scores minus β·ΣKL, normalised over the trajectories of a group, as in GRPO. A^S: step returns
    normalised by the same method over the turns that siblings took in the same state; 0 for a turn that is
    alone in its state. Both are clipped to ±`reward_clip`. `reward_normalization.grouping` concerns only
    A^E."""

    spec = ESTIMATORS["gigpo"]

    def __init__(self, settings: AlgorithmSettings, kl_controller: KLController | None = None) -> None:
        super().__init__(settings, kl_controller)
        self.step_normalizer = resolve_normalizer(settings.reward_normalization, self.spec.normalization)
        of_episodes = self.normalizer.running
        of_steps = self.step_normalizer.running
        if of_episodes and of_steps:
            self.running = RunningParts({"episode": of_episodes, "step": of_steps})

    def compare(
        self,
        groups: Sequence[Group],
        tokens: ResponseTokens,
        returns: Array,
    ) -> tuple[Array, list[Metric]]:
        owner = tokens.trajectory_of_turn
        penalty_of_each = [trajectory.score_kl_penalty for trajectory in tokens.trajectories]
        penalties = np.array(penalty_of_each, dtype=np.float64)
        ids = group_ids(groups, self.normalizer.grouping)
        of_episodes = self.normalizer(tokens.scores - penalties, ids, tokens.weights)
        of_episodes, metrics = self._bounded("episode", of_episodes)
        task_groups = group_ids(groups)[owner]
        buckets = state_buckets(tokens, task_groups)
        of_steps = self.step_normalizer(returns, buckets, tokens.weights[owner])
        of_steps, step_metrics = self._bounded("step", of_steps)
        advantages = (
            self.settings.episode_reward_weight * of_episodes[owner]
            + self.settings.step_reward_weight * of_steps
        )
        metrics += step_metrics
        metrics += bucket_metrics(tokens, task_groups, buckets)
        return advantages, metrics
