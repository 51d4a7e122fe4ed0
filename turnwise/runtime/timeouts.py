"""Timeouts of many waits that hardly ever expire: waits of equal length share one timer of the event loop."""

from __future__ import annotations

import asyncio
import time
from contextvars import Context
from itertools import takewhile
from typing import Protocol


class HasDeadline(Protocol):
    """A wait with a deadline, in `time.monotonic()`."""

    deadline: float

    def expire(self) -> None: ...


class Timeouts:
    """Ends the waits of `timeout_s` seconds on one event loop.

    They expire in the order in which they began. A timer for each wait would double a wait's cost, and the loop keeps cancelled
    timers, and the objects they refer to, until most of its timers are cancelled.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self.loop = loop
        self._timeout_s = timeout_s
        self._waits: dict[HasDeadline, None] = {}
        self._is_armed = False

    def add(self, wait: HasDeadline) -> None:
        """Adds a wait; its deadline must not be before that of an earlier one."""
        self._waits[wait] = None
        if not self._is_armed:
            self._arm(self._timeout_s)

    def remove(self, wait: HasDeadline) -> None:
        """Removes a wait that is over."""
        self._waits.pop(wait, None)

    def _arm(self, delay_s: float) -> None:
        self._is_armed = True
        # An empty context, since the current one would keep its waits alive.
        self.loop.call_later(delay_s, self._look, context=Context())

    def _look(self) -> None:
        self._is_armed = False
        now = time.monotonic()
        overdue = list(takewhile(lambda wait: wait.deadline <= now, self._waits))
        for wait in overdue:
            del self._waits[wait]
        first = next(iter(self._waits), None)
        if first is not None:
            # A look takes as long as the list, so one look per hundredth of the time is enough.
            self._arm(max(first.deadline - now, self._timeout_s / 100))
        for wait in overdue:
            wait.expire()
