"""Notices what users' code does with signals outside the main thread. Python refuses `signal.signal` there;
timers (SIGALRM) it allows, and their signal would end the process, so they are refused here. Many libraries
limit their time with SIGALRM, and many functions catch the refusal and go on with a result that means
nothing."""

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any, Self


class _OfThread(threading.local):
    """How many calls were refused in the current thread, and how many watches are open in it."""

    refused = 0
    watches = 0


_HERE = _OfThread()

REFUSAL = "signal only works in main thread"
"""Part of the message of Python's ValueError, and of ours."""


class SignalWatch:
    """Counts, while its body runs, the refused calls of `signal.signal`, `alarm` and `setitimer` in this
    thread (`num_refused`)."""

    __slots__ = ("_before", "num_refused")

    def __enter__(self) -> Self:
        _watch_signals()
        self.num_refused = 0
        self._before = _HERE.refused
        _HERE.watches += 1
        return self

    def __exit__(self, *_: object) -> None:
        _HERE.watches -= 1
        self.num_refused = _HERE.refused - self._before


@functools.cache
def _watch_signals() -> None:
    """Puts functions around those of `signal`. They stay there, since other threads may be about to call
    them; outside a watch, and in the main thread, they change nothing."""
    signal.signal = _counting(signal.signal)
    signal.alarm = _refusing(signal.alarm, seconds_at=0)
    signal.setitimer = _refusing(signal.setitimer, seconds_at=1)


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError:
            if not _is_main_thread():
                _HERE.refused += 1
            raise

    return counting


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _refusing(original: Callable[..., Any], seconds_at: int) -> Callable[..., Any]:
    """A function that refuses to start a timer inside a watch outside the main thread. `seconds_at` is the
    place of the argument that is 0 if the call only stops a timer."""

    @functools.wraps(original)
    def refusing(*args: Any) -> Any:
        starts = len(args) > seconds_at and args[seconds_at] != 0
        if starts and _HERE.watches and not _is_main_thread():
            _HERE.refused += 1
            raise ValueError(
                f"{REFUSAL} of the main interpreter, so a timer's signal would reach the run itself"
            )
        return original(*args)

    return refusing
