"""Ends Python code that doesn't end by itself, such as a chat template that loops on the messages of one row
only."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class ComputedTooLong(BaseException):
    """A block took more processor time than it may. It isn't an Exception, so that the block can't catch it
    by accident."""


@dataclass(slots=True)
class _Block:
    """A block that runs now. `started_s` is the processor time of its thread when the watching thread first
    saw it."""

    started_s: float | None = None
    is_ended: bool = False


class TimeLimit:
    """Limits the processor time of blocks. One thread watches all of them, so entering a block costs a
    microsecond.

    >>> limit = TimeLimit(limit_s=0.1, period_s=0.02)
    >>> try:
    ...     with limit.kept():
    ...         while True:
    ...             pass
    ... except ComputedTooLong:
    ...     print("ended")
    ended
    """

    def __init__(self, limit_s: float, period_s: float = 1.0) -> None:
        self.limit_s = limit_s
        self._period_s = period_s
        self._running: dict[int, _Block] = {}
        self._lock = threading.Lock()
        self._watching: threading.Thread | None = None
        if sys.platform != "win32":
            # A forked process has no watching thread, and its copy of the lock may be held for ever.
            os.register_at_fork(after_in_child=self._forget)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Raises ComputedTooLong inside the block once the block has computed for more than `limit_s`
        seconds. The exception comes between two steps of Python: it ends loops, but not one endless step. A
        block inside a block has the limit of the outer one."""
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="time limit", daemon=True)
            self._watching.start()
        thread = threading.get_ident()
        if thread in self._running:
            yield
            return
        block = self._running[thread] = _Block()
        try:
            yield
        finally:
            with self._lock:
                del self._running[thread]
                if block.is_ended:
                    # An exception that wasn't delivered yet must not hit what runs later.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def _forget(self) -> None:
        self._running.clear()
        self._lock = threading.Lock()
        self._watching = None

    def _watch(self) -> None:
        while True:
            time.sleep(self._period_s)
            for thread, block in list(self._running.items()):
                with self._lock:
                    if self._running.get(thread) is block:
                        self._look_at(thread, block)

    def _look_at(self, thread: int, block: _Block) -> None:
        """Ends the block if it has computed too long. It is called with the lock held, while the block can't
        end."""
        now_s = _computed_s(thread)
        if block.started_s is None:
            block.started_s = now_s
        elif now_s - block.started_s > self.limit_s and not block.is_ended:
            block.is_ended = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(ComputedTooLong)
            )


def _computed_s(thread: int) -> float:
    """The processor time of a running thread in seconds, so that a machine that sleeps or is overloaded ends
    nothing. Where it can't be measured, it's the time of a clock."""
    if sys.platform == "linux":
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()
