"""What a run's health is judged by: the metrics of its last steps, and summaries of all steps so far. A
change of training success only counts if it exceeds several standard errors. These are estimated from how
neighbouring steps differ: steps play different tasks, so a binomial error would be too small."""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from turnwise.tracking.first_updates import FirstUpdates
from turnwise.types import Group

SOME = 5
"""Number of consecutive steps that are looked at for a level, such as that of the entropy."""
BLOCK = 10
"""Number of consecutive steps that are looked at for a mean."""
IS_SOLVED = 0.9
"""From this success rate on, the tasks count as solved, and low entropy and equal scores are no problem."""
NUM_FOR_NOISE = 50
"""Number of recent steps that a standard error is estimated from."""

Row = Mapping[str, float]
Figures = defaultdict[str, float]
"""A step's metrics. A metric that wasn't measured reads as NaN, so every comparison with it is false."""


class Validation(NamedTuple):
    """Held-out success, and how many training steps came before."""

    num_steps: int
    success: float
    num_episodes: float


class History:
    """What the conditions look at: the metrics of the last `BLOCK` steps, and summaries of all steps so
    far."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.points: deque[Figures] = deque(maxlen=BLOCK)
        self.success: list[float] = []
        """The success rate of every step; NaN if it wasn't measured."""
        self.validations: list[Validation] = []
        self.has_differed = False
        """Whether any step so far had a group whose episodes scored differently."""
        self.most_usable = 0.0
        self.lowest_entropy = math.inf
        self.first_updates = FirstUpdates()
        self.best: Sequence[float] = ()
        """The successes of the `BLOCK` consecutive steps with the highest mean."""

    def add(self, row: Row, groups: Sequence[Group] = ()) -> None:
        held_out = _mean_of(row, "val/env/", "/success")
        if not math.isnan(held_out):
            self.validations.append(Validation(self.num_steps, held_out, row.get("val/num_episodes", 0.0)))
        if not any(name.startswith("rollout/") for name in row):
            return
        self.num_steps += 1
        point = _figures(row)
        self.points.append(point)
        self.first_updates.add(point, groups)
        self.success.append(point["success"])
        if not point["alike"]:
            self.has_differed = True
        self.most_usable = max(self.most_usable, point["usable"])
        recent = [point["entropy"] for point in self.last(SOME)]
        if len(recent) == SOME and all(map(math.isfinite, recent)):
            self.lowest_entropy = min(self.lowest_entropy, fmean(recent))
        block = self.successes(-BLOCK)
        if len(block) < BLOCK:
            return
        if not self.best or fmean(block) > fmean(self.best):
            self.best = block

    def last(self, number: int) -> Sequence[Figures]:
        """The last `number` steps (at most `BLOCK`), or nothing if fewer steps have ended."""
        if len(self.points) < number:
            return ()
        return list(self.points)[-number:]

    def successes(self, start: int | None = None, stop: int | None = None) -> Sequence[float]:
        """The known successes of a slice of the steps."""
        return [success for success in self.success[start:stop] if math.isfinite(success)]

    def error(self, num_steps: int = BLOCK) -> float:
        """Standard error of the difference between two means of `num_steps` success rates each; inf if fewer
        than two are known. It is estimated from differences of neighbouring steps, so that no trend inflates
        it."""
        recent = self.successes(-NUM_FOR_NOISE)
        if len(recent) < 2:
            return math.inf
        mean_square = fmean((later - earlier) ** 2 for earlier, later in pairwise(recent))
        return math.sqrt(mean_square / num_steps)

    def is_solved(self, number: int) -> bool:
        """Whether nearly all episodes of the last `number` steps succeeded; False if no success of these
        steps is known."""
        successes = self.successes(-number)
        return bool(successes) and fmean(successes) >= IS_SOLVED


def _figures(row: Row) -> Figures:
    """The row, with NaN for missing metrics and with added figures: `is_critic`; `alike` (whether all
    advantages are 0, or with a critic all scores equal, or the filter left no group); `usable` (share of
    valid answers); `success` (mean over tags); `entropy` (−mean log-prob if not measured). A missing mean
    score is replaced by the mean score before the group filter."""
    figures: Figures = defaultdict(lambda: math.nan, row)
    figures.setdefault("rollout/score/mean", figures["rollout/unfiltered_score/mean"])
    # The advantages of a critic are never all 0: its errors are in them.
    figures["is_critic"] = "critic/values/mean" in row
    spread = "rollout/score" if figures["is_critic"] else "critic/advantages"
    low = figures[f"{spread}/min"]
    high = figures[f"{spread}/max"]
    # If a filter has left nothing, all groups were rejected.
    is_empty = row.get("rollout/filtered", 0) > 0 and "rollout/score/mean" not in row
    is_level = low == high and (bool(figures["is_critic"]) or low == 0)
    figures["alike"] = is_empty or is_level
    shares = (figures["rollout/parsed"], _mean_of(row, "env/", "/action_is_valid"))
    figures["usable"] = min(filter(math.isfinite, shares), default=math.nan)
    figures["success"] = _mean_of(row, "env/", "/success")
    # An update that is left out measures no entropy.
    figures["entropy"] = row.get("actor/entropy", -figures["rollout/log_prob/mean"])
    return figures


def _mean_of(row: Row, start: str, end: str) -> float:
    values = [value for name, value in row.items() if name.startswith(start) and name.endswith(end)]
    if not values:
        return math.nan
    return fmean(values)
