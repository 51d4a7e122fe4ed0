"""Processes that hold ranks of training roles. The event loop keeps running while a call waits for their
answer."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from turnwise.cluster.messages import Parcel
from turnwise.cluster.process import WorkerProcess, add_stacks
from turnwise.errors import DeadlineError, WorkerError
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.threads import DaemonThread
from turnwise.runtime.watchdog import Watchdog

RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]
"""Waits for a coroutine while the run's event loop turns."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class CallSettings:
    """How a run waits for the calls of its ranks. A call may take `deadline_s` seconds; None = no limit."""

    run_async: RunAsync
    watchdog: Watchdog
    stopwatch: Stopwatch
    deadline_s: float | None = None


class RankProcess(ABC):
    """A process that holds ranks, and the thread that makes their calls, one after the other. New calls are
    refused while an overdue call runs."""

    def __init__(self, name: str, settings: CallSettings) -> None:
        self.name = name
        self.settings = settings
        self._thread = DaemonThread(name)
        self._has_ended = False
        self._running_call = ""
        self._overdue_call = ""

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended by itself."""
        return False

    @property
    def is_out_of_reach(self) -> bool:
        """Whether nobody can say at the moment if the process has ended."""
        return False

    def start(self, name: str, parcel: Parcel) -> Started:
        """Queues a call. Raises DeadlineError while a call past its deadline runs, and WorkerError if the
        process was ended."""
        if self._overdue_call and self._overdue_call == self._running_call:
            raise DeadlineError(
                f"{name} can't be called: {self._overdue_call} is past its deadline and still runs"
            )
        if self._has_ended:
            raise WorkerError(f"{name} can't be called: {self.name} was ended")
        return Started(name, self._thread.start(self._run, name, parcel), self)

    def wait_for(self, name: str, call: Awaitable[Any]) -> Any:
        """Waits for a call while the event loop runs, and returns its result. Raises DeadlineError past the
        deadline."""
        return self.settings.run_async(self._wait_for(name, call))

    async def _wait_for(self, name: str, call: Awaitable[Any]) -> Any:
        settings = self.settings
        async with settings.watchdog.waiting(
            "the pipeline",
            name,
            settings.deadline_s,
            "deadlines.train_s",
        ):
            return await call

    def abandon(self) -> None:
        """Notes that nobody waits for the running call any more. Past the deadline, adds the process's stacks
        to the error."""
        wait = self.settings.watchdog.expired()
        if wait is not None:
            self._overdue_call = self._running_call
            add_stacks(wait, self.name, self._stacks())

    def end(self) -> None:
        """Ends the process, even in the middle of a call. Calling it again is harmless."""
        if not self._has_ended:
            self._has_ended = True
            self._end()

    def kill(self) -> None:
        """Ends the process even if it doesn't respond."""
        self.end()

    def is_free_within(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` seconds for the running call to end, and returns whether none runs any
        more."""
        end = time.monotonic() + timeout_s
        while self._running_call and time.monotonic() < end:
            time.sleep(_POLL_S)
        return not self._running_call

    def _run(self, name: str, parcel: Parcel) -> Any:
        self._running_call = name
        try:
            return self._ask(name, parcel)
        finally:
            self._running_call = ""

    @abstractmethod
    def _ask(self, name: str, parcel: Parcel) -> Any:
        """Runs a command and returns its result. Called in the thread that makes the calls."""

    @abstractmethod
    def _stacks(self) -> str:
        """The stacks of the process."""

    @abstractmethod
    def _end(self) -> None: ...


class ConnectedRanks(RankProcess):
    """Ranks in another process."""

    def __init__(self, process: WorkerProcess, settings: CallSettings) -> None:
        super().__init__(process.name, settings)
        self.process = process

    @property
    def is_gone(self) -> bool:
        return self.process.life.is_gone

    @property
    def is_out_of_reach(self) -> bool:
        return self.process.life.is_out_of_reach

    def kill(self) -> None:
        if not self._has_ended:
            self.process.life.kill()
        self.end()

    def _ask(self, name: str, parcel: Parcel) -> Any:
        return self.process.ask(name, parcel)

    def _stacks(self) -> str:
        return self.process.life.stacks()

    def _end(self) -> None:
        self.process.end(self._thread)


@dataclass(frozen=True, slots=True)
class Started:
    """The future result of a call of a rank, as a `protocols.Pending`."""

    name: str
    future: Future[Any]
    process: RankProcess

    def result(self) -> Any:
        """Waits while the event loop runs. Raises the call's error, DeadlineError, or WorkerError if the
        process has ended."""
        return self.process.wait_for(self.name, self)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        try:
            return await asyncio.wrap_future(self.future)
        except asyncio.CancelledError:
            # A call that was waiting behind another one is cancelled and never sent.
            if self.future.cancelled() or not self.future.done():
                self.process.abandon()
            raise
