"""What a run spends its time on, added up where it is spent: cheap enough to be always on."""

from __future__ import annotations

import time
from typing import Any

LOOP, ENGINE, ENVIRONMENTS, IDLE = "event loop", "engine", "environments", "idle"
"""Tracks: the event loop turns, and while it does, the engine computes, environments are called on it, or nobody has anything
to do."""


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

    def add(self, track: str, name: str, started: float, ended: float | None = None, **facts: Any) -> None:
        """Something called `name` has run on `track` from `started` to `ended`, in seconds of `now`, or until now. Each track
        has one thread."""
        self._spent(track, (self.now() if ended is None else ended) - started)

    def close(self) -> None:
        """What is kept is written."""

    def _spent(self, track: str, seconds: float) -> None:
        self.totals[track] = self.totals.get(track, 0.0) + seconds
