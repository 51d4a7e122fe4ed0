"""Reward normalisation: scores of trajectories, centred and scaled within a grouping; float64 [T] for T trajectories.

If one run of an agent returns several trajectories (sub-agents, compaction), their weights add up to 1, so Σw is a number of
runs. Means are Σw·s / Σw, and the unbiased variance is Σw·(s−μ)² / (Σw − 1). With weights of 1 these are the usual statistics.
If all trajectories of a run have the same score, these are exactly the statistics over runs.

`running` statistics are over every score since training began, whatever the grouping. A batch is added before it is normalised,
so the first batch is normalised by itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.algorithms.settings import RewardNormalization
from turnwise.errors import ConfigError
from turnwise.spec import METHOD_STATISTICS, Grouping, NormalizationMethod, Statistic
from turnwise.types import Group


class RunningMoments:
    """Weighted count, mean and unbiased standard deviation of all values since training began; they are saved in checkpoints.

    Batches are merged by their moments, which avoids cancellation (Welford 1962; Chan, Golub & LeVeque 1983,
    "Algorithms for Computing the Sample Variance", eq. 2.1).

    >>> running = RunningMoments()
    >>> running.update(np.array([1.0, 2.0]))
    >>> running.update(np.array([6.0]))
    >>> running.count, running.mean, round(running.std, 6)
    (3.0, 3.0, 2.645751)
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """Standard deviation; 0 for fewer than two values."""
        return float(np.sqrt(self._squares / (self.count - 1.0))) if self.count > 1.0 else 0.0

    def update(self, values: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> None:
        """Adds `values` [T]; `weights` [T], default 1, count how often each was seen."""
        weight = np.ones(len(values)) if weights is None else weights
        added = float(weight.sum())
        if added == 0.0:
            return
        mean = float((weight * values).sum()) / added
        total, shift = self.count + added, mean - self.mean
        self._squares += float((weight * (values - mean) ** 2).sum()) + shift**2 * self.count * added / total
        self.mean += shift * added / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self._squares = state["count"], state["mean"], state["squares"]


class RunningParts:
    """Several statistics by name, saved and restored together."""

    def __init__(self, parts: Mapping[str, RunningMoments]) -> None:
        self._parts = dict(parts)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


Scores = NDArray[np.float64]
Defaults = tuple[Grouping, NormalizationMethod]
MIN_STD = 1e-6
"""Scores whose standard deviation is at most this count as equal. The constant is also added to the divisor."""


@dataclass(frozen=True, slots=True)
class Normalizer:
    """One resolved way to normalise: (s − μ) / (σ + 1e-6), without the parts whose type is `none`.

    The result is 0 if the mean or σ is that of a single run, or if σ ≤ 1e-6. Each call adds its scores to `running`, if given.

    >>> normalize = Normalizer("traj_group_id", "mean_std", "group", "group")
    >>> normalize(np.array([1.0, 0, 0, 1, 3, 3]), np.array([0, 0, 0, 0, 1, 1])).round(6).tolist()
    [0.866024, -0.866024, -0.866024, 0.866024, 0.0, 0.0]
    """

    grouping: Grouping
    method: NormalizationMethod
    mean_type: Statistic
    std_type: Statistic
    running: RunningMoments | None = None

    @property
    def is_identity(self) -> bool:
        """Whether scores stay as they are."""
        return self.mean_type == self.std_type == "none"

    def __call__(self, scores: Scores, group_ids: NDArray[np.int64], weights: Scores | None = None) -> Scores:
        """Normalised `scores` [T]. `group_ids` [T] name the groups of the grouping; `weights` [T] default to 1."""
        weight = np.ones(len(scores)) if weights is None else np.asarray(weights, dtype=np.float64)
        if self.running is not None:
            self.running.update(scores, weight)
        result = np.asarray(scores, dtype=np.float64).copy()
        defined = np.ones(len(scores), dtype=bool)
        if self.mean_type != "none":
            mean, _, num_runs = self._statistics(self.mean_type, scores, group_ids, weight)
            result -= mean
            defined &= num_runs > 1
        if self.std_type != "none":
            _, std, num_runs = self._statistics(self.std_type, scores, group_ids, weight)
            defined &= (num_runs > 1) & (std > MIN_STD)
            result /= std + MIN_STD
        result = np.where(defined, result, 0.0)
        return result.clip(-1.0, 3.0) if self.method == "asym_clip" else result

    def _statistics(
        self, over: Statistic, scores: Scores, group_ids: NDArray[np.int64], weights: Scores
    ) -> tuple[Scores, Scores, Scores]:
        """Mean, standard deviation and number of runs of the scores that each trajectory is compared with, [T] each."""
        if over == "running" and self.running is not None:
            same = np.ones(len(scores))
            return same * self.running.mean, same * self.running.std, same * self.running.count
        return group_statistics(scores, np.zeros_like(group_ids) if over == "batch" else group_ids, weights)


def group_statistics(scores: Scores, ids: NDArray[np.int64], weights: Scores) -> tuple[Scores, Scores, Scores]:
    """Weighted mean, unbiased standard deviation and number of runs of each trajectory's group, [T] each.

    >>> mean, std, num_runs = group_statistics(np.array([1.0, 0.0, 5.0]), np.array([0, 0, 1]), np.ones(3))
    >>> mean.tolist(), std.round(6).tolist(), num_runs.tolist()
    ([0.5, 0.5, 5.0], [0.707107, 0.707107, 0.0], [2.0, 2.0, 1.0])
    """
    _, index = np.unique(ids, return_inverse=True)
    num_runs = np.bincount(index, weights).astype(np.float64)
    num_runs = np.where(np.abs(num_runs - 1.0) < 1e-9, 1.0, num_runs)  # thirds and sixths only nearly add up to 1
    mean = np.bincount(index, weights * scores) / np.maximum(num_runs, np.finfo(np.float64).tiny)
    squares = np.bincount(index, weights * (scores - mean[index]) ** 2)
    variance = np.divide(squares, num_runs - 1.0, out=np.zeros(len(squares)), where=num_runs > 1.0)
    return mean[index], np.sqrt(variance)[index], num_runs[index]


def resolve_normalizer(asked: RewardNormalization, default: Defaults | Literal["own"]) -> Normalizer:
    """`asked`, completed by `default` (grouping, method). With default `own`, asking for a normalisation raises ConfigError."""
    as_it_is: Defaults = ("traj_group_id", "identity")
    default_grouping, default_method = as_it_is if default == "own" else default
    method = asked.method or default_method
    mean_type, std_type = METHOD_STATISTICS[method]
    mean_type, std_type = asked.norm_mean_type or mean_type, asked.norm_std_type or std_type
    normalizer = Normalizer(
        grouping=asked.grouping or default_grouping,
        method=method,
        mean_type=mean_type,
        std_type=std_type,
        running=RunningMoments() if "running" in (mean_type, std_type) else None,
    )
    if default == "own" and (normalizer.grouping, normalizer.is_identity) != ("traj_group_id", True):
        raise ConfigError("this adv_estimator centres scores in its own way; remove reward_normalization.")
    return normalizer


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
