"""Notices calls of `signal.signal` outside the main thread, where Python refuses them. Many libraries limit their time with
SIGALRM, and many functions catch the refusal and go on with a result that means nothing."""

import functools
import signal
import threading
from typing import Any, Self


class _Refused(threading.local):
    """How many calls were refused in the current thread."""

    count = 0


_REFUSED = _Refused()

REFUSAL = "signal only works in main thread"
"""Part of the message of Python's ValueError."""


class SignalWatch:
    """Counts, while its body runs, the refused calls of `signal.signal` in this thread (`num_refused`)."""

    __slots__ = ("_before", "num_refused")

    def __enter__(self) -> Self:
        _count_refusals()
        self.num_refused = 0
        self._before = _REFUSED.count
        return self

    def __exit__(self, *_: object) -> None:
        self.num_refused = _REFUSED.count - self._before


@functools.cache
def _count_refusals() -> None:
    """Puts a function around `signal.signal` that counts its refusals. It stays there, since other threads may be about to call
    it; it changes nothing else."""
    original = signal.signal

    @functools.wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError:
            if threading.current_thread() is not threading.main_thread():
                _REFUSED.count += 1
            raise

    signal.signal = counting
