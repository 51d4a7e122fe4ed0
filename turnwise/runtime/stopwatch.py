"""What a run spends its time on, added up where it is spent: cheap enough to be always on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOOP, ENGINE, ENVIRONMENTS = "event loop", "engine", "environments"
"""Tracks: the event loop turns, and while it does, the engine computes or environments are called on it."""
IDLE, HELD = "idle", "held"
"""Tracks: or nobody has anything to do, while episodes play or while none does."""


@dataclass(slots=True)
class Work:
    """What somebody has to do before the run goes on, and how far it is."""

    unit: str = ""
    """`episodes` or `micro-batches`."""
    total: int = 0
    done: int = 0
    tokens: int = 0
    """Tokens of the micro-batches that are done."""
    count: Callable[[], int] | None = None
    """Counts what is done, where that is only worth it when somebody looks."""

    @property
    def num_done(self) -> int:
        return self.done if self.count is None else self.count()


class Stopwatch:
    """Seconds by track, such as `engine` or `environments`. `tracking.timeline.Timeline` also keeps when it was.

    >>> stopwatch = Stopwatch()
    >>> stopwatch.add("engine", "step", started=stopwatch.now(), batch_size=4)
    >>> stopwatch.totals["engine"] >= 0.0
    True
    """

    now = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.num_playing = 0
        """Groups of episodes that play now."""
        self.num_sampled = 0
        """Tokens that servers have sampled."""
        self.work = Work()
        """What the phase that goes on waits for."""

    def add(self, track: str, name: str, started: float, ended: float | None = None, **details: Any) -> None:
        """Something called `name` has run on `track` from `started` to `ended`, in seconds of `now`, or until now. Each track
        has one thread."""
        self._spent(track, (self.now() if ended is None else ended) - started)

    def did_batch(self, num_tokens: int) -> None:
        """A micro-batch of the present work is done."""
        self.work.done += 1
        self.work.tokens += num_tokens

    def close(self) -> None:
        """What is kept is written."""

    def _spent(self, track: str, seconds: float) -> None:
        self.totals[track] = self.totals.get(track, 0.0) + seconds
