"""Estimators on whole trajectories: all trained tokens of a trajectory get the same advantage."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.algorithms.advantages import clip, summary, write_advantages
from turnwise.algorithms.estimator import Estimator, tokens_of
from turnwise.algorithms.normalization import MIN_STD, differ, factorize, group_ids, group_statistics
from turnwise.algorithms.response_tokens import Array, Index
from turnwise.errors import ConfigError
from turnwise.spec import ESTIMATORS
from turnwise.types import Group, Metric


@dataclass(frozen=True, slots=True)
class TrajectoryScores:
    """The input of `ScoreEstimator.transform`: arrays [T] with one entry per trajectory."""

    scores: Array
    """Scores minus the KL penalty."""
    groups: Index
    """Number of the group in which scores are compared: by default a task's siblings
    (`reward_normalization.grouping`)."""
    weights: Array
    """Weights of the trajectories. If one run of an agent returns several trajectories, their weights add up
    to 1."""
    lengths: Index
    """Numbers of trained tokens."""
    runs: Index
    """Number, from 0, of the agent run that returned the trajectory; an agent and its sub-agents are one
    run."""


class ScoreEstimator(Estimator):
    """Base of the estimators on trajectory scores; a subclass defines `transform`. The order is: s ← s −
    β·ΣKL, `transform`, clip to ±`reward_clip`, copy to all trained tokens of the trajectory, whitening over
    tokens, clip to ±`advantage_clip`."""

    def credit(self, groups: Sequence[Group]) -> list[Metric]:
        tokens = tokens_of(groups)
        penalties, metrics = self.penalize(tokens)
        scores = tokens.scores
        outcomes = TrajectoryScores(
            scores=scores - tokens.totals(penalties),
            groups=group_ids(groups, self.normalizer.grouping),
            weights=tokens.weights,
            lengths=tokens.lengths,
            runs=run_index(groups),
        )
        transformed = self.transform(outcomes)
        rewards, clip_metrics = clip("critic/reward_clip_frac", transformed, self.settings.reward_clip)
        metrics += clip_metrics
        metrics += summary("critic/score", scores)
        metrics += summary("critic/rewards", rewards)
        advantages = np.repeat(rewards, tokens.lengths)
        return metrics + write_advantages(tokens, advantages, self.settings)

    def transform(self, outcomes: TrajectoryScores) -> Array:
        """The advantages [T] of the trajectories: by default their scores, normalised by
        `reward_normalization`."""
        return self.normalizer(outcomes.scores, outcomes.groups, outcomes.weights)


def run_index(groups: Sequence[Group]) -> Index:
    """The agent run, numbered from 0, that each trajectory [T] belongs to. A trajectory of weight 1 is a run
    of its own. Trajectories of less weight are one run if they share group and `sibling` number."""
    keys = []
    for index, group in enumerate(groups):
        for number, trajectory in enumerate(group.trajectories):
            is_run = trajectory.weight >= 1.0
            keys.append((index, trajectory.sibling, number if is_run else -1))
    return factorize(keys)


class GRPO(ScoreEstimator):
    """A = (s − μ) / (σ + 1e-6) over the siblings (Shao et al. 2024, arXiv:2402.03300, section 4.1). `method:
    mean` with `loss_agg_mode: seq-mean-token-sum-norm` is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""

    spec = ESTIMATORS["grpo"]


class GRPOPassK(ScoreEstimator):
    """GRPO for pass@k: A = (s_max − s_second) / (σ + 1e-6) for the best run of a group, 0 for the others; 0
    for all if the two best are equal (Tang et al. 2025, arXiv:2503.19595). A run's score is the weighted mean
    of its trajectories' scores; a run of weight 0 is neither best nor second. `transform` raises ConfigError
    for a group of one run."""

    spec = ESTIMATORS["grpo_passk"]

    def transform(self, outcomes: TrajectoryScores) -> Array:
        scores = outcomes.scores
        groups = outcomes.groups
        weights = outcomes.weights
        run = outcomes.runs
        run_weights = np.bincount(run, weights)
        divisor = np.where(run_weights > 0, run_weights, 1.0)
        run_scores = np.bincount(run, weights * scores) / divisor
        _, std, _ = group_statistics(scores, groups, weights)
        result = np.zeros_like(scores)
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            candidates = np.unique(run[members])
            if len(candidates) < 2:
                raise ConfigError(
                    "adv_estimator grpo_passk compares the best of a group with the second best, and a group "
                    "of 1 has none; set train_env_manager.group_size to at least 2"
                )
            candidates = candidates[run_weights[candidates] > 0]
            if len(candidates) < 2 or std[members[0]] <= MIN_STD:
                continue
            best_two = np.argsort(run_scores[candidates], kind="stable")[-2:]
            second, best = candidates[best_two]
            winners = members[run[members] == best]
            margin = run_scores[best] - run_scores[second]
            result[winners] = margin / (std[winners] + MIN_STD)
        return result


class GPG(ScoreEstimator):
    """A = α(s − μ) over the siblings. α = B / (B − M) makes up for groups that teach nothing: of B
    trajectories in the batch, M are in groups of equal scores (Chu et al. 2025, arXiv:2504.02546). A
    trajectory with s = μ in any other group doesn't count in M, although its advantage is 0, too."""

    spec = ESTIMATORS["gpg"]

    def transform(self, outcomes: TrajectoryScores) -> Array:
        scores = outcomes.scores
        weights = outcomes.weights
        mean, std, _ = group_statistics(scores, outcomes.groups, weights)
        differs = std > MIN_STD
        teaching = float(weights[differs].sum())
        scale = float(weights.sum()) / teaching if teaching else 0.0
        return np.where(differs, scores - mean, 0.0) * scale


class OPO(ScoreEstimator):
    """A = s − Σ len·s / Σ len over the group; len is weight times trained tokens (Hao et al. 2025,
    arXiv:2505.23585)."""

    spec = ESTIMATORS["opo"]

    def transform(self, outcomes: TrajectoryScores) -> Array:
        scores = outcomes.scores
        groups = outcomes.groups
        lengths = outcomes.weights * outcomes.lengths
        total = np.bincount(groups, lengths)
        divisor = np.where(total > 0, total, 1.0)
        baseline = np.bincount(groups, lengths * scores) / divisor
        return np.where(differ(scores, groups), scores - baseline[groups], 0.0)


class RLOO(ScoreEstimator):
    """A = s minus the weighted mean score of the other siblings; 0 without others (Ahmadian et al. 2024,
    arXiv:2402.14740). A trajectory's baseline leaves out its whole agent run: otherwise the baseline would
    depend on what the run did."""

    spec = ESTIMATORS["rloo"]

    def transform(self, outcomes: TrajectoryScores) -> Array:
        scores = outcomes.scores
        group = outcomes.groups

        def over_siblings(x: Array) -> Array:
            own_run = np.bincount(outcomes.runs, x)[outcomes.runs]
            siblings = np.bincount(group, x)[group] - own_run
            return siblings.astype(np.float64)

        num_siblings = over_siblings(outcomes.weights)
        total = over_siblings(outcomes.weights * scores)
        has_siblings = num_siblings > 1e-9  # thirds and sixths only nearly add up to 1
        baseline = total / np.where(has_siblings, num_siblings, 1.0)
        is_compared = has_siblings & differ(scores, group)
        return np.where(is_compared, scores - baseline, 0.0)


class ReinforcePlusPlusBaseline(ScoreEstimator):
    """A = s − μ over the siblings, 0 for a single run; whitened over the batch's tokens (Hu 2025,
    arXiv:2501.03262)."""

    spec = ESTIMATORS["reinforce_plus_plus_baseline"]

    def transform(self, outcomes: TrajectoryScores) -> Array:
        mean, _, num_runs = group_statistics(outcomes.scores, outcomes.groups, outcomes.weights)
        is_compared = (num_runs > 1.0) & differ(outcomes.scores, outcomes.groups)
        return np.where(is_compared, outcomes.scores - mean, 0.0)
