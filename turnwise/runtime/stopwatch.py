"""Adds up what a run spends its time on and how many tokens its models compute. This is cheap enough to be
always on."""

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class TokenCounts(NamedTuple):
    """Counts of the tokens that went through a model.

    >>> TokenCounts(unmerged=100, distinct=60, computed=80).padding_share
    0.25
    """

    unmerged: int = 0
    """Tokens of all samples; a prefix that several samples share counts for each of them."""
    distinct: int = 0
    """Tokens of the samples, where a prefix shared within a micro-batch counts once."""
    computed: int = 0
    """Positions of the model's input, including padding."""

    @property
    def padding_share(self) -> float:
        return 1 - self.distinct / self.computed

    @property
    def merged_share(self) -> float:
        return 1 - self.distinct / self.unmerged

    def plus(self, counts: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*map(operator.add, self, counts))

    def minus(self, counts: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*map(operator.sub, self, counts))


LOOP = "event loop"
ENGINE = "engine"
ENVIRONMENTS = "environments"
"""Tracks of the event loop: all the time that it runs, and the parts that the engine and calls of
environments take."""
IDLE = "idle"
HELD = "held"
"""Tracks of the time that the event loop waits with nothing to do: while episodes play, and while no episode
plays."""


@dataclass(slots=True)
class Work:
    """A piece of work that the run waits for, and its progress."""

    unit: str = ""
    """`episodes` or `micro-batches`."""
    total: int = 0
    finished: int = 0
    tokens: int = 0
    """Tokens of the finished micro-batches."""
    count: Callable[[], int] | None = None
    """Returns the number of finished units. It replaces `finished` where updating a counter would cost too
    much."""

    @property
    def num_done(self) -> int:
        if self.count is None:
            return self.finished
        return self.count()


class Stopwatch:
    """Adds up seconds by track, like `engine` or `environments`. `tracking.timeline.Timeline` also records
    when each span ran.

    >>> stopwatch = Stopwatch()
    >>> stopwatch.add("engine", "step", started=stopwatch.now(), batch_size=4)
    >>> stopwatch.totals["engine"] >= 0.0
    True
    """

    now = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.num_playing = 0
        """Number of groups playing now."""
        self.num_sampled = 0
        """Tokens that servers have sampled."""
        self.work = Work()
        """The work of the current phase."""
        self.tokens = TokenCounts()
        """Tokens of all passes of policy, critic, reference and reward model; servers' passes don't count."""

    def add(
        self,
        track: str,
        name: str,
        started: float,
        ended: float | None = None,
        **details: Any,
    ) -> None:
        """Records that `name` ran on `track` from `started` to `ended` (times of `now()`; None = now). Only
        one thread may add to a track."""
        if ended is None:
            ended = self.now()
        self._spent(track, ended - started)

    def did_batch(self, num_tokens: int) -> None:
        """Notes a finished micro-batch of the current work."""
        self.work.finished += 1
        self.work.tokens += num_tokens

    def did_tokens(self, counts: TokenCounts) -> None:
        """Notes the tokens of finished passes."""
        self.tokens = self.tokens.plus(counts)

    def close(self) -> None:
        """Writes what a subclass keeps; a plain stopwatch keeps nothing."""

    def _spent(self, track: str, seconds: float) -> None:
        self.totals[track] = self.totals.get(track, 0.0) + seconds
