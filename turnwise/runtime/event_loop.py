"""The event loop of a run. A task that blocks the loop for too long ends the run with an error that names the
task."""

import asyncio
import gc
import inspect
import selectors
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self, TypeVar

from turnwise.errors import DeadlineError
from turnwise.runtime.stopwatch import HELD, IDLE, LOOP, Stopwatch
from turnwise.runtime.threads import DaemonExecutor
from turnwise.runtime.watchdog import Wait, Watchdog

T = TypeVar("T")

_SETTING = "deadlines.env_s"
_BEAT_S = 1.0  # seconds between two signs that the loop iterates
_COLLECTOR = (50_000, 20, 10)
"""Thresholds of Python's garbage collector while the loop runs. With its defaults (700, 10, 10) it scans the
live objects of thousands of episodes again and again, which takes a third of the processor time of an
episode's turns."""


class LoopIteration(Wait):
    """The deadline of one iteration of an event loop. No other task runs until the running task awaits
    something."""

    _timer: asyncio.TimerHandle | None = None

    async def keep(self, main: Coroutine[Any, Any, T], results: list[T]) -> None:
        """Awaits `main` and appends its result to `results`. The deadline moves on as long as the loop
        iterates. The result isn't returned: whenever `asyncio.Runner` restores its Ctrl-C handler, `signal`
        formats the task and its result, which takes half a second for a step's trajectories."""
        self._loop = asyncio.get_running_loop()
        self._beat()
        try:
            results.append(await main)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _beat(self) -> None:
        if self.timeout_s is not None:
            self.renew()
            beat_s = min(_BEAT_S, self.timeout_s / 4)
            self._timer = self._loop.call_later(beat_s, self._beat)

    def interrupt(self) -> None:
        # Siblings of the blocking task may be about to block too.
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        super().interrupt()


class WatchedRunner:
    """An `asyncio.Runner` whose event loop is watched from its first `run` to its `close`. A task that blocks
    the loop for `iteration_s` seconds (None = no limit) without a deadline of its own ends the run.
    `asyncio.to_thread` uses daemon threads. The `stopwatch` records how long the loop ran and how long it was
    idle."""

    def __init__(
        self,
        watchdog: Watchdog | None = None,
        iteration_s: float | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.watchdog = watchdog or Watchdog()
        self.stopwatch = stopwatch or Stopwatch()
        self._runner = asyncio.Runner(loop_factory=partial(new_loop, self.stopwatch))
        self._iteration_s = iteration_s
        self._at_close = ExitStack()
        self._before_close: list[Callable[[], Coroutine[Any, Any, object]]] = []

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop itself."""
        return self._runner.get_loop()

    def before_close(self, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Has `close` run what `main` makes on the loop, before the loop's tasks are cancelled."""
        self._before_close.append(main)

    def at_close(self, function: Callable[[], object]) -> None:
        """Has `close` call a function, once the loop's tasks have ended."""
        self._at_close.callback(function)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs `main` and returns its result. Raises DeadlineError if a task blocked the loop for too
        long."""
        watchdog = self.watchdog
        watchdog.start()
        watchdog.loop = self._runner.get_loop()
        doing = "the event loop", "a task that blocks it"
        with LoopIteration(
            watchdog,
            *doing,
            self._iteration_s,
            _SETTING,
            DeadlineError,
        ) as iteration:
            watchdog.loop_iteration = iteration
            results: list[T] = []
            started = self.stopwatch.now()
            try:
                with seldom_collecting(), outer_loop_aside():
                    self._runner.run(iteration.keep(main, results))
            except asyncio.CancelledError:
                # asyncio forgets a Ctrl-C that comes while it sets up its handler: it cancels the task, which
                # never starts.
                if iteration.report is None and inspect.getcoroutinestate(main) == inspect.CORO_CREATED:
                    raise KeyboardInterrupt from None
                raise
            finally:
                self.stopwatch.add(LOOP, "turning", started)
                if inspect.getcoroutinestate(main) == inspect.CORO_CREATED:
                    main.close()  # after an early Ctrl-C: avoids Python's warning that it was never awaited
            return results[0]

    def close(self) -> None:
        """Cancels the loop's remaining tasks and closes the loop. Raises DeadlineError if they don't end in
        time."""
        try:
            end = self.watchdog.waiting(
                "the end of the run", "its event loop to close", self._iteration_s, _SETTING
            )
            with end, outer_loop_aside():
                try:
                    while self._before_close:
                        self._runner.run(self._before_close.pop()())
                finally:
                    self._runner.close()
        finally:
            self._at_close.close()
            self.watchdog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def outer_loop_aside() -> Iterator[None]:
    """Lets another event loop run in a thread that runs one already, such as a notebook's. The outer loop
    pauses meanwhile. asyncio itself refuses to nest loops, since few programs want their loop to pause."""
    outer = asyncio._get_running_loop()
    if outer is None:
        yield
        return
    if sys.version_info >= (3, 12):
        task = asyncio.tasks._swap_current_task(outer, None)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if sys.version_info >= (3, 12):
            asyncio.tasks._swap_current_task(outer, task)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Raises the garbage collector's thresholds while the body runs, unless automatic collection is off
    (threshold 0)."""
    outer = gc.get_threshold()
    within = outer
    if outer[0]:
        first, second, third = map(max, _COLLECTOR, outer)
        within = (first, second, third)
        gc.set_threshold(*within)
    try:
        yield
    finally:
        # If somebody else has set thresholds meanwhile, those stay.
        if gc.get_threshold() == within:
            gc.set_threshold(*outer)


class IdleSelector(selectors.DefaultSelector):
    """Times an event loop's waits for something to do."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        super().__init__()
        self._stopwatch = stopwatch

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        started = self._stopwatch.now()
        events = super().select(timeout)
        if self._stopwatch.num_playing:
            self._stopwatch.add(IDLE, "nothing to do", started)
        else:
            self._stopwatch.add(HELD, "no episode plays", started)
        return events


class OwnLoop(asyncio.SelectorEventLoop):
    """An event loop that only its own end stops. Code of users that runs on it would end the run by
    `stop`."""

    _main: asyncio.Future[Any] | None = None
    _is_stop_due = False
    """Whether Ctrl-C has left the loop after the end of the run before, and before asyncio's callback that
    stops the loop for it."""

    def run_until_complete(self, future: Any) -> Any:
        outer = self._main
        main = asyncio.ensure_future(future, loop=self)
        self._main = main
        is_stop_due = False
        try:
            return super().run_until_complete(main)
        except KeyboardInterrupt:
            is_stop_due = main.done()
            raise
        finally:
            self._main = outer
            self._is_stop_due = is_stop_due

    def stop(self) -> None:
        if self._main is not None and not self._main.done():
            if self._is_stop_due:
                self._is_stop_due = False
                return
            raise RuntimeError(
                "this is the event loop of the whole run, which nobody may stop; return instead"
            )
        super().stop()


def new_loop(stopwatch: Stopwatch | None = None) -> asyncio.AbstractEventLoop:
    """An event loop whose `asyncio.to_thread` doesn't keep the process from ending."""
    loop = OwnLoop(IdleSelector(stopwatch or Stopwatch()))
    loop.set_default_executor(DaemonExecutor())
    loop.set_exception_handler(_report)
    return loop


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # A second Ctrl-C is raised in whichever task runs, and leaves the loop as well: nobody reads that task's
    # exception.
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)
