"""How Ctrl-C ends a program. If a weight update has begun, a run first finishes and saves the step."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any

from turnwise.runtime.call_board import CALLS

EXIT_INTERRUPTED = 130
_CONTINUED_BY: ContextVar[str] = ContextVar("continued_by", default="")
_LIKE_CTRL_C = ("SIGTERM", "SIGHUP")  # the signals of a cluster that ends a job, and of a closed terminal


@contextmanager
def continued_by(words: str) -> Iterator[None]:
    """Inside, an interrupted run says that it continues with `words`: the caller may lack
    `resume_from_checkpoint`. Of nested calls the outermost counts, since that is what the user called."""
    token = _CONTINUED_BY.set(_CONTINUED_BY.get() or words)
    try:
        yield
    finally:
        _CONTINUED_BY.reset(token)


def how_to_continue() -> str:
    """What continues a run that is interrupted now."""
    return _CONTINUED_BY.get() or "resume_from_checkpoint=true"


class Interrupts:
    """Holds Ctrl-C back while a step is trained and saved, and lets it through everywhere else.

    After `hold` a first Ctrl-C is remembered until `release`, which raises KeyboardInterrupt. A second Ctrl-C
    raises it at once. Elsewhere Ctrl-C raises it as usual, and asyncio then cancels the running episodes.
    `hold` and `release` do nothing outside the main thread, since Python delivers signals to the main thread
    only."""

    def __init__(self) -> None:
        self._is_pressed = False
        self._previous: Any = None
        self._doing = ""

    def hold(self, doing: str) -> None:
        """Makes Ctrl-C wait for `release`. At Ctrl-C, `doing` tells the user what the program finishes
        first."""
        self._is_pressed = False
        self._doing = doing
        if _is_main_thread() and self._previous is None:
            self._previous = signal.signal(signal.SIGINT, self._remember)

    def release(self) -> None:
        """Restores the previous handler of Ctrl-C. Raises KeyboardInterrupt if Ctrl-C was pressed since
        `hold`."""
        self.restore()
        if self._is_pressed:
            raise KeyboardInterrupt

    def restore(self) -> None:
        """Restores the previous handler of Ctrl-C, if `hold` has replaced it. A remembered Ctrl-C isn't
        raised."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self._is_pressed:
            raise KeyboardInterrupt
        self._is_pressed = True
        # Fails if the terminal is closed (SIGHUP), or is being written to.
        with suppress(OSError, ValueError, RuntimeError):
            print(f"\n{self._doing}; press Ctrl-C again to drop it", file=sys.stderr, flush=True)


@contextmanager
def ends_by_signals() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt, even if a shell has started the process with Ctrl-C ignored, or
    `ends_at_once` is active. Signals that end a job (SIGTERM, or SIGHUP of a closed terminal) count as
    Ctrl-C."""
    if not _is_main_thread():
        yield
        return
    previous = {}
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, _end):
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _LIKE_CTRL_C:
        number = signal.Signals.__members__.get(name)
        # nohup ignores SIGHUP on purpose.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Makes Ctrl-C end the process at once. Use it around a command's imports, when there is nothing to save:
    a library that catches KeyboardInterrupt in the middle of its imports would continue without a part of
    itself and fail later."""
    if not _is_main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, previous)


def _end(signum: int, frame: FrameType | None) -> None:
    if not CALLS.is_finished:
        os.write(sys.stderr.fileno(), b"interrupted\n")
    fork_server = sys.modules.get("turnwise.cluster.fork_server")  # not imported here, since that takes long
    if fork_server is not None:
        fork_server.drop_processes()
    CALLS.finish(EXIT_INTERRUPTED)
    os._exit(EXIT_INTERRUPTED)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
