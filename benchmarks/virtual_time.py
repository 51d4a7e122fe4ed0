"""An event loop whose clock jumps: when nothing is ready, it is at once the time of the next timer."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """A selector that never waits. What it would have waited is added to `now`."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise RuntimeError("nothing is ready, and no timer is set: the simulation stands still")
        self.now += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in virtual time. `time()` begins at 0."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now
