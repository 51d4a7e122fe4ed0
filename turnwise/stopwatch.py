"""What a run spends its time on, added up where it is spent: cheap enough to be always on."""

from __future__ import annotations

import time
from typing import Any

LOOP, ENGINE, ENVIRONMENTS = "event loop", "engine", "environments"
"""Tracks: the event loop turns, and while it does, the engine computes or environments are called on it."""
IDLE, HELD = "idle", "held"
"""Tracks: or nobody has anything to do, while episodes play or while none does."""


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

    def add(self, track: str, name: str, started: float, ended: float | None = None, **facts: Any) -> None:
        """Something called `name` has run on `track` from `started` to `ended`, in seconds of `now`, or until now. Each track
        has one thread."""
        self._spent(track, (self.now() if ended is None else ended) - started)

    def close(self) -> None:
        """What is kept is written."""

    def _spent(self, track: str, seconds: float) -> None:
        self.totals[track] = self.totals.get(track, 0.0) + seconds
