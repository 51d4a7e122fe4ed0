"""Deadlines of waits. Past its deadline a wait ends with an error that says who waits for whom, and shows the
stacks. `docs/design/watchdog.md` lists the waits of a run and their deadlines."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextvars import Context, ContextVar
from itertools import chain
from types import FrameType, TracebackType
from typing import Any, Self

from turnwise.errors import DeadlineError, TurnwiseError
from turnwise.runtime.call_board import CALLS
from turnwise.runtime.stacks import WATCHDOG, describe_stacks

logger = logging.getLogger(__name__)

EXIT_STATUS = 2
"""Exit status of a process whose main thread is stuck; the same as for every error."""
_SAME_STACKS_S = 0.1  # many waits for one thing end together, so they share one look at the stacks
_LONGEST_S = 1e6  # the longest time that faulthandler can be armed for
_STDERR = 2
_SIGNAL = signal.Signals.__members__.get("SIGUSR2")


_awaiting: ContextVar[Wait | None] = ContextVar("_awaiting", default=None)
"""The innermost wait around the current task. Tasks that it starts inherit this wait."""


_NO_CONTEXT = Context()


class Interrupt(asyncio.CancelledError):
    """Raised inside a call that is past its deadline. The `Wait` around the call replaces it with
    `Wait.error`. Like any cancellation, an Interrupt isn't an `Exception`, so that code that retries after
    failures doesn't swallow it."""


class Wait:
    """One wait, used once: by `with` around code that blocks the main thread (and must not await), by `async
    with` around code that awaits. It raises `error` when it is left after its deadline. A `with` in another
    thread than the watched one does only that: nobody interrupts it."""

    deadline = float("inf")
    """A time of `time.monotonic()`. Past it the wait is interrupted and gets a new deadline at the end of a
    grace period."""
    report: str | None = None
    """Text of the error; None until the deadline has passed."""
    outer: Wait | None = None
    """The wait around this one."""
    is_interrupted = False
    _has_cancelled = False
    _is_watched = True

    def __init__(
        self,
        watchdog: Watchdog,
        waiter: str,
        awaited: str,
        timeout_s: float | None,
        setting: str,
        error: type[TurnwiseError],
    ) -> None:
        self._watchdog = watchdog
        self.waiter = waiter
        self.awaited = awaited
        self.timeout_s = timeout_s
        self.setting = setting
        self.error = error

    def __str__(self) -> str:
        return (
            f"{self.waiter} waited {self.timeout_s:g} s for {self.awaited}; raise {self.setting} if that may "
            "take longer"
        )

    def __enter__(self) -> Self:
        watchdog = self._watchdog
        if self.timeout_s is not None:
            self.deadline = time.monotonic() + self.timeout_s
        self._is_watched = watchdog.watched_id in (None, threading.get_ident())
        if self._is_watched:
            self.outer = watchdog.innermost
            watchdog.innermost = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_watched:
            self._watchdog.innermost = self.outer
        # A call that returned late fails too: failing must not depend on when the watchdog looked.
        if self.report is None and fault is None and time.monotonic() > self.deadline:
            self.report = str(self)
        if self.report is not None and not isinstance(fault, KeyboardInterrupt | SystemExit):
            raise self.error(self.report) from None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancels = task.cancelling()
        self.outer = _awaiting.get()
        self._token = _awaiting.set(self)
        self._before = self._watchdog.of_task.get(task)
        self._watchdog.of_task[task] = self
        if self.timeout_s is not None:
            self.renew()
            self._watchdog.look_at(self.deadline)

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        _awaiting.reset(self._token)
        if self._before is None:
            del self._watchdog.of_task[self._task]
        else:
            self._watchdog.of_task[self._task] = self._before
        # Tasks started inside may outlive the wait.
        self.deadline = float("inf")
        if self._has_cancelled:
            self._task.uncancel()
        # Somebody else has cancelled the task too, and waits for its end.
        is_cancelled = self._task.cancelling() > self._num_cancels
        if self.report is None or (is_cancelled and isinstance(fault, asyncio.CancelledError)):
            return
        if not isinstance(fault, KeyboardInterrupt | SystemExit):
            raise self.error(self.report) from None

    def renew(self) -> None:
        """Restarts the time limit."""
        if self.timeout_s is not None:
            self.deadline = time.monotonic() + self.timeout_s

    def expire(self) -> None:
        """Handles the deadline of an awaiting task: keeps the report and cancels the task."""
        if self.report is not None:
            return
        self.report = self._watchdog.describe(self, asyncio.get_running_loop())
        self.deadline = time.monotonic() + self._watchdog.grace_s
        self._has_cancelled = True
        self._task.cancel()

    def is_due_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this wait belongs to a task of `loop` and has a deadline that `expire` hasn't handled
        yet."""
        return self.report is None and self.deadline < float("inf") and self._task.get_loop() is loop

    def interrupt(self) -> None:
        """Called by the signal handler: the exception ends the call that blocks the main thread."""
        raise Interrupt


class Watchdog:
    """Ends waits of one thread, usually the main one, that run past their deadlines.

    A timer of the event loop cancels a task that awaits too long. For a call that blocks the main thread, a
    daemon thread checks the deadlines every `poll_s` seconds; it collects the stacks and interrupts the call
    by a signal (SIGUSR2), as Ctrl-C would. If the call doesn't end within `grace_s`, it is stuck in C code,
    and the process ends with the error's text on stderr. Without Unix signals, or off the main thread,
    nothing can be interrupted, so the process ends after the grace. While C code holds Python's lock (the
    GIL), the daemon thread can't check. Then `faulthandler` prints bare stacks and ends the process, at the
    deadline plus twice `grace_s`, or after `stall_s` plus twice `grace_s` if that is later.

    Without `start`, blocking calls aren't interrupted; a wait past its deadline raises its error when its
    call returns.

    >>> with Watchdog().waiting("the doctest", "nothing", 60.0, "the number of seconds"):
    ...     pass
    """

    def __init__(self, grace_s: float = 30.0, poll_s: float = 0.1, stall_s: float = 600.0) -> None:
        self.grace_s = grace_s
        self._poll_s = poll_s
        self._stall_s = stall_s
        self.innermost: Wait | None = None
        """The innermost blocking wait of the thread; only the thread itself writes it."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that the thread runs."""
        self.loop_iteration: Wait | None = None
        """The wait whose deadline limits how long a task may block `loop`."""
        self.of_task: dict[asyncio.Task[Any], Wait] = {}
        """The innermost wait of each task that awaits something with a deadline."""
        self._timer: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle, float] | None = None
        """The loop, its timer for the earliest deadline, and that deadline. Waits share one timer, because
        most end long before their deadlines."""
        self._pending: Wait | None = None  # the wait to be interrupted, until the interrupt is raised
        self._stacks = ""
        self._stacks_at = float("-inf")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None  # the watched thread, if it can be interrupted
        self.watched_id: int | None = None
        """The thread whose blocking waits are looked at; None before `start`."""
        self._previous: Any = None

    def waiting(
        self,
        waiter: str,
        awaited: str,
        timeout_s: float | None,
        setting: str,
        error: type[TurnwiseError] = DeadlineError,
    ) -> Wait:
        """A wait of `waiter` for `awaited`, of at most `timeout_s` seconds (None = no limit), which the key
        `setting` sets."""
        return Wait(self, waiter, awaited, timeout_s, setting, error)

    def start(self) -> None:
        """Watches the calling thread. Does nothing if this watchdog has been started already."""
        if self._thread is not None:
            return
        if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(_SIGNAL, self._on_signal)
            self._thread_id = threading.get_ident()
        self.watched_id = threading.get_ident()
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name=WATCHDOG, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching and restores the signal handler, unless somebody else has set one."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        faulthandler.cancel_dump_traceback_later()
        if _SIGNAL is not None and self._thread_id is not None:
            is_ours = signal.getsignal(_SIGNAL) == self._on_signal
            if is_ours:
                signal.signal(_SIGNAL, self._previous or signal.SIG_DFL)
        self._thread_id = None
        self.watched_id = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look_at(self, deadline: float) -> None:
        """Makes the running event loop check all waits at `deadline` (monotonic time), unless an earlier
        check is planned."""
        loop = asyncio.get_running_loop()
        if self._timer is not None and self._timer[0] is loop:
            if self._timer[2] <= deadline:
                return
            self._timer[1].cancel()
        # The context of a wait would keep the waits around it alive.
        remaining_s = deadline - time.monotonic()
        handle = loop.call_later(remaining_s, self._look, loop, context=_NO_CONTEXT)
        self._timer = loop, handle, deadline

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        time_s = time.monotonic()
        # A task inherits the waits around its creator, so that one wait may be in several chains.
        waits = set(chain.from_iterable(map(_chain, self.of_task.values())))
        due = [wait for wait in waits if wait.is_due_in(loop)]
        for wait in sorted(due, key=lambda wait: wait.deadline):
            if wait.deadline > time_s:
                return self.look_at(wait.deadline)
            wait.expire()

    def expired(self) -> Wait | None:
        """The innermost of the waits around the running task that are past their deadlines; None if no wait
        is."""
        for wait in _chain(_awaiting.get()):
            if wait.report is not None:
                return wait
        return None

    def describe(self, wait: Wait, loop: asyncio.AbstractEventLoop | None) -> str:
        """A text that says who waits for whom, with the stacks of all other threads and tasks."""
        if time.monotonic() - self._stacks_at > _SAME_STACKS_S:
            self._stacks = describe_stacks(loop)
            self._stacks_at = time.monotonic()
        return f"{wait}\n{self._stacks}"

    def _waits(self) -> list[Wait]:
        """The thread's current waits, innermost first. `loop_iteration` is left out if the running task has a
        deadline."""
        waits = list(_chain(self.innermost))
        if self.loop is None or self.loop_iteration not in waits:
            return waits
        index = waits.index(self.loop_iteration)
        inside = waits[:index]
        task = asyncio.current_task(self.loop)
        if task is not None:
            inside += _chain(self.of_task.get(task))
        is_limited = any(wait.deadline < float("inf") for wait in inside)
        if is_limited:
            index += 1
        return inside + waits[index:]

    def _watch(self) -> None:
        self._arm(self._stall_s)
        while not self._stop.wait(self._poll_s):
            waits = self._waits()
            iteration = self.loop_iteration
            time_s = time.monotonic()
            if iteration is not None and iteration not in waits:
                iteration.renew()
            earliest = min((wait.deadline for wait in waits), default=time_s)
            self._arm(earliest - time_s)
            overdue = next((wait for wait in waits if time_s > wait.deadline), None)
            if overdue is not None and overdue.is_interrupted:
                self._give_up(overdue)
            elif overdue is not None:
                overdue.report = overdue.report or self.describe(overdue, self.loop)
                overdue.deadline = time.monotonic() + self.grace_s
                overdue.is_interrupted = True
                self._pending = overdue
            elif self._pending not in waits:
                self._pending = None
            if self._pending is not None and self._thread_id is not None and _SIGNAL is not None:
                signal.pthread_kill(self._thread_id, _SIGNAL)

    def _arm(self, remaining_s: float) -> None:
        """Makes faulthandler end the process after `remaining_s` or more (up to `_LONGEST_S`). The next call
        restarts it."""
        timeout_s = max(remaining_s, self._stall_s) + 2 * self.grace_s
        faulthandler.dump_traceback_later(min(timeout_s, _LONGEST_S), exit=True, file=_STDERR)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        wait = self._pending
        if wait is None:
            if callable(self._previous):
                self._previous(signum, frame)
        elif frame is not None and frame.f_code.co_filename == __file__:
            # A wait is being entered or left. If it continues, the next look sends another signal.
            return
        elif wait in self._waits():
            self._pending = None
            wait.interrupt()

    def _give_up(self, wait: Wait) -> None:
        """Ends the process. Nothing here may wait for a lock of the stuck thread before the text is out."""
        text = (
            f"error: {wait.report}\nit didn't come back within {self.grace_s:g} s of being interrupted: "
            f"the process ends\n"
        )
        os.write(_STDERR, text.encode())
        logger.info("%s", text)  # to the file only: the terminal has it
        CALLS.finish(EXIT_STATUS)
        os._exit(EXIT_STATUS)


def _chain(wait: Wait | None) -> Iterator[Wait]:
    while wait is not None:
        yield wait
        wait = wait.outer
