"""Notices that one of a run's first two updates broke the policy: everything that is measured later follows
from that."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from turnwise.types import Group

NUM_UPDATES = 2
"""The number of first updates that are looked at."""
FELL_SHARE = 0.25
"""Success must fall by more than this share of what it was, and by more than its 95% interval."""
FELL_USABLE = 0.5
"""Or the share of valid actions must fall by more than this."""
Z = 1.96
MIN_CHANGE = 0.05
"""Nats per token. An update that changed the log-probs by less has broken nothing, so success fell by
chance."""
NAN = math.nan


class Level(NamedTuple):
    """How well the policy played in one step."""

    success: float
    """Share of episodes that succeeded, or a mean score in [0, 1]; NaN if neither was measured."""
    num_episodes: float
    usable: float
    """Share of valid actions; NaN if unknown."""
    error: float = 0.0
    """Standard error of the success, from how the groups differ; 0 if the groups aren't known."""


class FirstUpdates:
    """Compares the policy after each of the first `NUM_UPDATES` updates with the policy before them."""

    def __init__(self) -> None:
        self.num_updates = 0
        """Steps with an update so far, before the latest step."""
        self._start: Level | None = None
        """The level of the policy before its first update."""
        self._latest = Level(NAN, NAN, NAN)
        self._learning_rate = NAN
        self._change = NAN

    def add(self, figures: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """Adds a step's metrics, as `health._figures` completes them, and the groups that were played in
        it."""
        if self._start is not None:
            self.num_updates += 1
        self._latest = _level(figures, groups)
        if self._start is None and figures["actor/backward_steps"] > 0:
            self._start = self._latest
        if self._start is not None and self.num_updates < NUM_UPDATES:
            self._learning_rate = _highest(self._learning_rate, figures["actor/lr"])
            self._change = _highest(self._change, figures["actor/log_prob_change"])

    def problem(self) -> str | None:
        """A sentence if the policy has just been broken by one of the first updates."""
        start = self._start
        if start is None or not 1 <= self.num_updates <= NUM_UPDATES:
            return None
        if not self.is_broken or self._change < MIN_CHANGE:
            return None
        parts = []
        if not math.isnan(start.success):
            parts.append(f"success fell from {start.success:.2f} to {self._latest.success:.2f}")
        if not math.isnan(start.usable):
            parts.append(f"valid actions went from {start.usable:.2f} to {self._latest.usable:.2f}")
        sentence = "the first update"
        if self.num_updates > 1:
            sentence = f"the first {self.num_updates} updates"
        if not math.isnan(self._learning_rate):
            sentence += f" with the learning rate {self._learning_rate:.3g}"
        sentence += " broke the model"
        if not math.isnan(self._change):
            sentence += f", which changed the log-probs of trained tokens by {self._change:.2g} nats"
        return f"{sentence}: {', '.join(parts)}"

    @property
    def is_broken(self) -> bool:
        """Whether the policy plays clearly worse than before the first update."""
        if self._start is None:
            return False
        has_lost_format = self._start.usable - self._latest.usable > FELL_USABLE
        return has_lost_format or _fell(self._start, self._latest)


def _level(figures: Mapping[str, float], groups: Sequence[Group]) -> Level:
    success = figures["success"]
    is_share = figures["rollout/score/min"] >= 0 and figures["rollout/score/max"] <= 1
    if math.isnan(success) and is_share:
        success = figures["rollout/score/mean"]
    num_episodes = _first_known(figures["system/samples"], figures["rollout/num_samples"])
    return Level(success, num_episodes, figures["usable"], _error_of(groups))


def _error_of(groups: Sequence[Group]) -> float:
    """The standard error of a mean over groups, whose siblings play the same task and so aren't
    independent."""
    means = [_success_of(group) for group in groups if group.trajectories]
    if len(means) < 2:
        return 0.0
    return pstdev(means) / math.sqrt(len(means))


def _success_of(group: Group) -> float:
    return fmean(trajectory.metrics.get("success", trajectory.score) for trajectory in group.trajectories)


def _fell(start: Level, latest: Level) -> bool:
    if not 0 <= start.success <= 1 or not 0 <= latest.success <= 1:
        return False
    fall = start.success - latest.success
    pooled = (start.success + latest.success) / 2
    variance = 0.0
    for level in (start, latest):
        if not level.num_episodes >= 1:
            return False
        variance += max(pooled * (1 - pooled) / level.num_episodes, level.error**2)
    return fall > FELL_SHARE * start.success and fall > Z * math.sqrt(variance)


def _first_known(*values: float) -> float:
    return next((value for value in values if not math.isnan(value)), NAN)


def _highest(*values: float) -> float:
    return max((value for value in values if not math.isnan(value)), default=NAN)
