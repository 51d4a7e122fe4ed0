"""Timers of many waits that are hardly ever needed: one of the event loop's for all waits of a length."""

from __future__ import annotations

import asyncio
import time
from contextvars import Context
from itertools import takewhile
from typing import Protocol


class HasDeadline(Protocol):
    """What ends at a deadline, in `time.monotonic()`, unless it is over by then."""

    deadline: float

    def expire(self) -> None: ...


class Timeouts:
    """Ends the waits of `timeout_s` seconds on one event loop.

    They are due in the order in which they began. A timer of its own for each would cost as much as all else that a wait does,
    and the loop keeps cancelled timers, with all that hangs on them, until most of them are.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self.loop = loop
        self._timeout_s = timeout_s
        self._waits: dict[HasDeadline, None] = {}
        self._is_armed = False

    def add(self, wait: HasDeadline) -> None:
        """A wait begins, whose deadline is that of none before it or later."""
        self._waits[wait] = None
        if not self._is_armed:
            self._arm(self._timeout_s)

    def remove(self, wait: HasDeadline) -> None:
        """It is over."""
        self._waits.pop(wait, None)

    def _arm(self, delay_s: float) -> None:
        self._is_armed = True
        # In a context of its own: the one at hand would keep the waits alive that are in it.
        self.loop.call_later(delay_s, self._look, context=Context())

    def _look(self) -> None:
        self._is_armed = False
        now = time.monotonic()
        overdue = list(takewhile(lambda wait: wait.deadline <= now, self._waits))
        for wait in overdue:
            del self._waits[wait]
        first = next(iter(self._waits), None)
        if first is not None:
            # Looking is as long as the list: a hundred looks a time are enough.
            self._arm(max(first.deadline - now, self._timeout_s / 100))
        for wait in overdue:
            wait.expire()
