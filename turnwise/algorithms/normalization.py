"""Reward normalisation: scores of trajectories, centred and scaled within a grouping. float64 [T], T trajectories.

Trajectories of one run (sub-agents, compaction) carry weights that add up to 1, so Σw is a number of runs: means are
Σw·s / Σw, and the unbiased variance is Σw·(s−μ)² / (Σw − 1). With weights of 1 these are the usual ones; where the
trajectories of each run share its score, they are exactly those over runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.algorithms.settings import RewardNormalization
from turnwise.errors import ConfigError, NotAvailableError, nearest
from turnwise.types import Group

Scores = NDArray[np.float64]
Statistic = Literal["group", "batch", "none"]

GROUPINGS: dict[str, str] = {
    "traj_group_id": "traj_group_id",
    "state": "traj_group_id",
    "tags": "tags",
    "inductive": "tags",
    "batch": "batch",
}
"""Each accepted name and what it means."""

METHODS: dict[str, tuple[Statistic, Statistic]] = {
    "identity": ("none", "none"),
    "mean": ("group", "none"),
    "mean_std": ("group", "group"),
    "asym_clip": ("group", "group"),
}
"""What each method takes the mean and the standard deviation over."""

MIN_STD = 1e-6
"""A standard deviation up to this is none: all scores are equal. Also what is added to one before dividing by it."""


@dataclass(frozen=True, slots=True)
class Normalizer:
    """One resolved way to normalise: (s − μ) / (σ + 1e-6) with either part left out where its type is `none`.

    A group of one gives 0 as soon as anything is taken over it, and so does a σ ≤ 1e-6.

    >>> normalize = Normalizer("traj_group_id", "mean_std", "group", "group")
    >>> normalize(np.array([1.0, 0, 0, 1, 3, 3]), np.array([0, 0, 0, 0, 1, 1])).round(6).tolist()
    [0.866024, -0.866024, -0.866024, 0.866024, 0.0, 0.0]
    """

    grouping: str
    method: str
    mean_type: Statistic
    std_type: Statistic

    def __call__(self, scores: Scores, group_ids: NDArray[np.int64], weights: Scores | None = None) -> Scores:
        """Normalised `scores` [T]. `group_ids` [T] name the groups of the grouping; `weights` [T] default to 1."""
        weight = np.ones(len(scores)) if weights is None else np.asarray(weights, dtype=np.float64)
        whole_batch = np.zeros(len(scores), dtype=np.int64)
        ids: dict[Statistic, NDArray[np.int64]] = {"group": group_ids, "batch": whole_batch}
        result = np.asarray(scores, dtype=np.float64).copy()
        defined = np.ones(len(scores), dtype=bool)
        if self.mean_type != "none":
            mean, _, num_runs = _statistics(scores, ids[self.mean_type], weight)
            result -= mean
            defined &= num_runs > 1
        if self.std_type != "none":
            _, std, num_runs = _statistics(scores, ids[self.std_type], weight)
            defined &= (num_runs > 1) & (std > MIN_STD)
            result /= std + MIN_STD
        result = np.where(defined, result, 0.0)
        return result.clip(-1.0, 3.0) if self.method == "asym_clip" else result


def _statistics(scores: Scores, ids: NDArray[np.int64], weights: Scores) -> tuple[Scores, Scores, Scores]:
    """Weighted mean, unbiased standard deviation and number of runs of each trajectory's group, [T] each."""
    _, index = np.unique(ids, return_inverse=True)
    num_runs = np.bincount(index, weights).astype(np.float64)
    num_runs = np.where(np.abs(num_runs - 1.0) < 1e-9, 1.0, num_runs)  # thirds and sixths add up to 1 only nearly
    mean = np.bincount(index, weights * scores) / np.maximum(num_runs, np.finfo(np.float64).tiny)
    squares = np.bincount(index, weights * (scores - mean[index]) ** 2)
    variance = np.divide(squares, num_runs - 1.0, out=np.zeros_like(squares), where=num_runs > 1.0)
    return mean[index], np.sqrt(variance)[index], num_runs[index]


def resolve_normalizer(asked: RewardNormalization, default: tuple[str, str] | Literal["own"]) -> Normalizer:
    """`asked` with its gaps filled by `default`, an estimator's `(grouping, method)`.

    Raises:
        ConfigError: a name that doesn't exist, or an estimator that normalises in its `own` way.
        NotAvailableError: running statistics.
    """
    if default == "own":
        raise ConfigError("this adv_estimator normalises scores in its own way; remove reward_normalization.")
    grouping = asked.grouping or default[0]
    method = asked.method or default[1]
    if grouping not in GROUPINGS:
        raise ConfigError(_unknown("grouping", grouping, list(GROUPINGS)))
    if method not in METHODS:
        raise ConfigError(_unknown("method", method, list(METHODS)))
    mean_type, std_type = METHODS[method]
    return Normalizer(
        grouping=GROUPINGS[grouping],
        method=method,
        mean_type=_statistic("norm_mean_type", asked.norm_mean_type, mean_type),
        std_type=_statistic("norm_std_type", asked.norm_std_type, std_type),
    )


def _statistic(key: str, asked: str | None, default: Statistic) -> Statistic:
    if asked is None:
        return default
    if asked == "running":
        raise NotAvailableError(f"reward_normalization.{key}: running statistics aren't in this version; use group or batch.")
    for known in ("group", "batch", "none"):
        if asked == known:
            return known
    raise ConfigError(_unknown(key, asked, ["group", "batch", "none", "running"]))


def _unknown(key: str, name: str, allowed: Sequence[str]) -> str:
    return f"reward_normalization.{key} {name!r} isn't one of {', '.join(allowed)}.{nearest(name, allowed)}"


def group_ids(groups: Sequence[Group], grouping: str) -> NDArray[np.int64]:
    """The group of each trajectory [T] under a grouping: siblings of a task, one environment tag, or the batch."""
    sizes = [len(group.trajectories) for group in groups]
    if grouping == "traj_group_id":
        ids = list(range(len(groups)))
    elif grouping == "tags":
        order = {tag: index for index, tag in enumerate(dict.fromkeys(group.task.tag for group in groups))}
        ids = [order[group.task.tag] for group in groups]
    else:
        ids = [0] * len(groups)
    return np.repeat(np.asarray(ids, dtype=np.int64), sizes)
