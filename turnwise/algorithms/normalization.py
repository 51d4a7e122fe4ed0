"""Reward normalisation: scores [T] of T trajectories (or returns of turns), centred and scaled within groups.

If one run of an agent returns several trajectories (sub-agents, compaction), their weights add up to 1, so Σw
is a number of runs. Means are Σw·s / Σw, and the unbiased variance is Σw·(s−μ)² / (Σw − 1). With weights of 1
these are the usual statistics. If all trajectories of a run have the same score, these are exactly the
statistics over runs.

`running` statistics are over every score since training began, whatever the grouping. A batch is added before
it is normalised, so the first batch is normalised by its own statistics."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.algorithms.response_tokens import Array, Index
from turnwise.algorithms.settings import RewardNormalization
from turnwise.errors import ConfigError
from turnwise.spec import METHOD_STATISTICS, Grouping, NormalizationMethod, Statistic
from turnwise.types import SAME_SCORE, Group


@dataclass(slots=True)
class RunningMoments:
    """Weighted count, mean and unbiased standard deviation of all values since training began; they are saved
    in checkpoints.

    Batches are merged by their moments, which avoids cancellation (Welford 1962; Chan, Golub & LeVeque 1983,
    "Algorithms for Computing the Sample Variance", eq. 2.1).

    >>> running = RunningMoments()
    >>> running.update(np.array([1.0, 2.0]), np.ones(2))
    >>> running.update(np.array([6.0]), np.ones(1))
    >>> running.count, running.mean, round(running.std, 6)
    (3.0, 3.0, 2.645751)
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Σ w·(x − mean)²."""

    @property
    def std(self) -> float:
        """Standard deviation; 0 if `count` is at most 1."""
        if self.count <= 1.0:
            return 0.0
        variance = self.squares / (self.count - 1.0)
        return float(np.sqrt(variance))

    def update(self, values: Array, weights: Array) -> None:
        """Adds `values` [T], weighted by `weights` [T]."""
        added = float(weights.sum())
        if added == 0.0:
            return
        mean = float((weights * values).sum()) / added
        total = self.count + added
        shift = mean - self.mean
        squares_within = float((weights * (values - mean) ** 2).sum())
        squares_between = shift**2 * self.count * added / total
        self.squares += squares_within + squares_between
        self.mean += shift * added / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count = state["count"]
        self.mean = state["mean"]
        self.squares = state["squares"]


@dataclass(slots=True)
class RunningParts:
    """Several statistics by name, saved and restored together."""

    parts: Mapping[str, RunningMoments]

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


MIN_STD = 1e-6
"""Scores with a standard deviation of at most `MIN_STD` count as equal. `MIN_STD` is also added to the
divisor."""


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Normalises scores: (s − μ) / (σ + 1e-6), without μ or σ if its type is `none`; `asym_clip` clips this
    to [−1, 3].

    The result is 0 if μ or σ is over a single run, if σ ≤ 1e-6, or if the scores of a group that μ is over
    are equal (`differ`). Each call adds its scores to `running`, if given.

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

    def __call__(self, scores: Array, group_ids: Index, weights: Array | None = None) -> Array:
        """Normalises `scores` [T]. `group_ids` [T] are the numbers of the scores' groups; `weights` [T]
        default to 1."""
        if weights is None:
            weights = np.ones(len(scores))
        weights = np.asarray(weights, dtype=np.float64)
        if self.running is not None:
            self.running.update(scores, weights)
        result = np.asarray(scores, dtype=np.float64).copy()
        defined = np.ones(len(scores), dtype=bool)
        if self.mean_type != "none":
            mean, _, num_runs = self._statistics(self.mean_type, scores, group_ids, weights)
            result -= mean
            defined &= num_runs > 1
        if self.mean_type == "group":
            defined &= differ(scores, group_ids)
        if self.std_type != "none":
            _, std, num_runs = self._statistics(self.std_type, scores, group_ids, weights)
            defined &= (num_runs > 1) & (std > MIN_STD)
            result /= std + MIN_STD
        result = np.where(defined, result, 0.0)
        if self.method == "asym_clip":
            return result.clip(-1.0, 3.0)
        return result

    def _statistics(
        self,
        over: Statistic,
        scores: Array,
        group_ids: Index,
        weights: Array,
    ) -> tuple[Array, Array, Array]:
        """Mean, standard deviation and number of runs of the scores that each trajectory is compared with,
        [T] each."""
        if over == "running" and self.running is not None:
            ones = np.ones(len(scores))
            return ones * self.running.mean, ones * self.running.std, ones * self.running.count
        if over == "batch":
            group_ids = np.zeros_like(group_ids)
        return group_statistics(scores, group_ids, weights)


def group_statistics(scores: Array, ids: Index, weights: Array) -> tuple[Array, Array, Array]:
    """Weighted mean, unbiased standard deviation and Σ weights (number of agent runs) of each trajectory's
    group, [T] each.

    >>> mean, std, num_runs = group_statistics(np.array([1.0, 0.0, 5.0]), np.array([0, 0, 1]), np.ones(3))
    >>> mean.tolist(), std.round(6).tolist(), num_runs.tolist()
    ([0.5, 0.5, 5.0], [0.707107, 0.707107, 0.0], [2.0, 2.0, 1.0])
    """
    _, index = np.unique(ids, return_inverse=True)
    num_runs = np.bincount(index, weights).astype(np.float64)
    is_single = np.abs(num_runs - 1.0) < 1e-9  # thirds and sixths only nearly add up to 1
    num_runs = np.where(is_single, 1.0, num_runs)
    divisor = np.maximum(num_runs, np.finfo(np.float64).tiny)
    mean = np.bincount(index, weights * scores) / divisor
    squares = np.bincount(index, weights * (scores - mean[index]) ** 2)
    variance = np.divide(squares, num_runs - 1.0, out=np.zeros(len(squares)), where=num_runs > 1.0)
    std = np.sqrt(variance)
    return mean[index], std[index], num_runs[index]


def differ(scores: Array, ids: Index) -> NDArray[np.bool_]:
    """Whether the scores of each trajectory's group differ by more than rounding (`SAME_SCORE`), [T].

    >>> differ(np.array([0.6, 0.1 + 0.2 + 0.3, 1.0, 0.0]), np.array([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """
    _, index = np.unique(ids, return_inverse=True)
    highest = np.full(len(scores), -np.inf)
    np.maximum.at(highest, index, scores)
    lowest = np.full(len(scores), np.inf)
    np.minimum.at(lowest, index, scores)
    return (highest - lowest > SAME_SCORE)[index]


def resolve_normalizer(
    settings: RewardNormalization,
    default: tuple[Grouping, NormalizationMethod] | Literal["own"],
) -> Normalizer:
    """`settings`, completed by `default` (grouping, method). With default `own`, asking for a normalisation
    raises ConfigError."""
    as_it_is: tuple[Grouping, NormalizationMethod] = ("traj_group_id", "identity")
    default_grouping, default_method = as_it_is if default == "own" else default
    grouping = settings.grouping or default_grouping
    method = settings.method or default_method
    default_mean_type, default_std_type = METHOD_STATISTICS[method]
    mean_type = settings.norm_mean_type or default_mean_type
    std_type = settings.norm_std_type or default_std_type
    has_running = "running" in (mean_type, std_type)
    normalizer = Normalizer(
        grouping=grouping,
        method=method,
        mean_type=mean_type,
        std_type=std_type,
        running=RunningMoments() if has_running else None,
    )
    leaves_scores = normalizer.grouping == "traj_group_id" and normalizer.is_identity
    if default == "own" and not leaves_scores:
        raise ConfigError("this adv_estimator centres scores in its own way; remove reward_normalization.")
    return normalizer


def group_ids(groups: Sequence[Group], grouping: Grouping = "traj_group_id") -> Index:
    """The number, from 0, of each trajectory's group [T]. A group is a task's siblings (`traj_group_id`), the
    trajectories of one environment tag (`tags`), or the whole batch (`batch`)."""
    ids: Index
    if grouping == "traj_group_id":
        ids = np.arange(len(groups))
    elif grouping == "tags":
        ids = factorize(group.task.tag for group in groups)
    else:
        ids = np.zeros(len(groups), np.int64)
    num_trajectories = [len(group.trajectories) for group in groups]
    return np.repeat(ids, num_trajectories)


def factorize(keys: Iterable[Hashable]) -> Index:
    """Numbers the keys from 0 in the order of their first appearance. Equal keys get the same number.

    >>> factorize(["b", "a", "b"]).tolist()
    [0, 1, 0]
    """
    number_of: dict[Hashable, int] = {}
    numbers = [number_of.setdefault(key, len(number_of)) for key in keys]
    return np.array(numbers, np.int64)
