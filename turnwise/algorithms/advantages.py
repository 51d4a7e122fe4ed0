"""From scores of trajectories to advantages of tokens, on nested data.

Every estimator that works on whole-trajectory scores is `credit_scores` with its own transform of the scores. The order is
fixed: KL penalty, transform (normalisation), reward clip, spread over tokens, whitening, advantage clip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.algorithms.controllers import KLController
from turnwise.algorithms.kl_penalty import penalize_kl
from turnwise.algorithms.masks import whiten
from turnwise.algorithms.normalization import Scores, group_ids
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.types import Group, Metric, Sample, Trajectory, samples_of

ScoreTransform = Callable[[Scores, NDArray[np.int64], Scores], Scores]
"""`(scores [T], group ids [T], trajectory weights [T]) → rewards [T]`."""


def credit_scores(
    groups: Sequence[Group],
    settings: AlgorithmSettings,
    controller: KLController,
    transform: ScoreTransform,
    grouping: str = "traj_group_id",
) -> list[Metric]:
    """Writes the advantages of an estimator on scores into every sample: one number a trajectory, on all its trained tokens.

    A trajectory of several samples (contexts) has the same number in each. Group statistics are over trajectories, never
    over tokens, so long episodes don't weigh more in them.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    tokens, metrics = penalize_kl(trajectories, settings, controller)
    penalties = np.array([sum(float(sample.sum()) for sample in samples) for samples in tokens], dtype=np.float64)
    for trajectory, penalty in zip(trajectories, penalties, strict=True):
        trajectory.score_kl_penalty = float(penalty)
    scores = np.array([trajectory.score for trajectory in trajectories], dtype=np.float64)
    weights = np.array([trajectory.weight for trajectory in trajectories], dtype=np.float64)
    rewards = transform(scores - penalties, group_ids(groups, grouping), weights)
    if settings.reward_clip is not None:
        is_clipped = np.abs(rewards) > settings.reward_clip
        rewards = rewards.clip(-settings.reward_clip, settings.reward_clip)
        metrics.append(Metric("critic/reward_clip_frac", float(is_clipped.mean()), weight=len(rewards)))
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        spread(trajectory, float(reward))
    metrics += [*summary("critic/score", scores), *summary("critic/rewards", rewards)]
    return metrics + finish_advantages(samples_of(groups), settings)


def spread(trajectory: Trajectory, advantage: float) -> None:
    """Writes one advantage on every trained token of a trajectory, 0 elsewhere."""
    for sample in trajectory.samples:
        sample.advantages = np.where(sample.response_mask, np.float32(advantage), np.float32(0.0))


def finish_advantages(samples: Sequence[Sample], settings: AlgorithmSettings) -> list[Metric]:
    """Whitens the advantages over all trained tokens of the batch and clips them, where the settings ask for it."""
    lengths = [sample.num_tokens for sample in samples]
    mask = np.concatenate([sample.response_mask for sample in samples])
    if not mask.any():
        return []
    advantages = torch.from_numpy(np.concatenate([_credited(sample) for sample in samples]).astype(np.float64))
    metrics = []
    if settings.whiten_advantages:
        advantages = whiten(advantages, torch.from_numpy(mask))
    if settings.advantage_clip is not None:
        is_clipped = (advantages.abs() > settings.advantage_clip).numpy()[mask]
        advantages = advantages.clamp(-settings.advantage_clip, settings.advantage_clip)
        metrics.append(Metric("critic/advantage_clip_frac", float(is_clipped.mean()), weight=len(is_clipped)))
    finished = advantages.numpy()
    for sample, part in zip(samples, np.split(finished, np.cumsum(lengths)[:-1]), strict=True):
        sample.advantages = part.astype(np.float32)
    return metrics + summary("critic/advantages", finished[mask])


def _credited(sample: Sample) -> NDArray[np.float32]:
    if sample.advantages is None:
        raise ValueError("finish_advantages needs advantages on every sample")
    return sample.advantages


def summary(name: str, values: NDArray[np.float64]) -> list[Metric]:
    """Mean, maximum and minimum of `values` as `name/mean`, `name/max`, `name/min`; nothing where there are none."""
    if not len(values):
        return []
    return [
        Metric(f"{name}/mean", float(values.mean()), "mean", weight=len(values)),
        Metric(f"{name}/max", float(values.max()), "max"),
        Metric(f"{name}/min", float(values.min()), "min"),
    ]
