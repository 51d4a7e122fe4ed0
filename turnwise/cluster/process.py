"""Processes on this machine that run the models of roles. The event loop keeps running while a call waits for their answer."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing.connection import Connection, Pipe
from textwrap import indent
from typing import Any

from turnwise.cluster.fork_server import prepare_processes
from turnwise.cluster.messages import DONE, RECORD, Command, Reply, dumps, loads
from turnwise.errors import DeadlineError, WorkerError
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.threads import DaemonThread
from turnwise.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]
_END_S = 60.0  # seconds that the end of a run waits for the thread that talked to a dead process
_STACK_S = 5.0  # seconds to wait for the stacks of a process
_POLL_S = 0.05


class TrainerProcess(ABC):
    """A process that holds ranks, and the thread that talks to it. New calls are refused while an overdue call runs."""

    def __init__(
        self, run_async: RunAsync, watchdog: Watchdog, stopwatch: Stopwatch, deadline_s: float | None, name: str
    ) -> None:
        self.name = name
        self.is_gone = False
        """Whether the process has ended by itself."""
        self._run_async = run_async
        self._watchdog = watchdog
        self._stopwatch = stopwatch
        self._deadline_s = deadline_s
        self._busy_with = ""  # the call that runs
        self._late = ""  # the call that is past its deadline
        self._has_ended = False
        self._thread = DaemonThread(name)

    def start(self, name: str, command: Command) -> Started:
        """Queues a call. Raises DeadlineError while a call past its deadline runs, and WorkerError if the process was ended."""
        if self._late and self._late == self._busy_with:
            raise DeadlineError(f"{name} can't be called: {self._late} is past its deadline and still runs")
        if self._has_ended:
            raise WorkerError(f"{name} can't be called: {self.name} was ended")
        return Started(name, self._thread.start(self._run, name, command), self)

    def wait_for(self, name: str, call: Awaitable[Any]) -> Any:
        """Waits for a call while the event loop runs, and returns its result. Raises DeadlineError past the deadline."""
        return self._run_async(self._wait_for(name, call))

    async def _wait_for(self, name: str, call: Awaitable[Any]) -> Any:
        async with self._watchdog.waiting("the pipeline", name, self._deadline_s, "deadlines.train_s"):
            return await call

    def left(self) -> None:
        """Notes that nobody waits for the running call any more. Past the deadline, adds the process's stacks to the error."""
        wait = self._watchdog.expired()
        if wait is not None:
            self._late = self._busy_with
            wait.report = f"{wait.report}\n  {self.name}:\n{indent(self._stack(), '    ')}"

    def end(self) -> None:
        """Ends the process, even in the middle of a call. Calling it again is harmless."""
        if not self._has_ended:
            self._has_ended = True
            self._end()

    def kill(self) -> None:
        """Ends the process even if it doesn't respond."""
        self.end()

    def is_free_within(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` seconds for the running call to end, and returns whether none runs any more."""
        end = time.monotonic() + timeout_s
        while self._busy_with and time.monotonic() < end:
            time.sleep(_POLL_S)
        return not self._busy_with

    def _run(self, name: str, command: Command) -> Any:
        self._busy_with = name
        try:
            return self._ask(name, command)
        finally:
            self._busy_with = ""

    @abstractmethod
    def _ask(self, name: str, command: Command) -> Any:
        """Runs a command and returns its result. Called in the thread that talks to the process."""

    @abstractmethod
    def _stack(self) -> str:
        """The stacks of the process."""

    @abstractmethod
    def _end(self) -> None: ...


class ConnectedProcess(TrainerProcess):
    """A process that a launcher has started, at the other end of a connection. It ends when the connection closes."""

    def __init__(self, connection: Connection, process_id: int, *talk: Any) -> None:
        super().__init__(*talk)
        self._connection = connection
        self._id = process_id

    def _end(self) -> None:
        self._thread.end()
        self._connection.close()

    def kill(self) -> None:
        if not self.is_gone:
            with suppress(ProcessLookupError):
                os.kill(self._id, signal.SIGKILL)
        self.end()

    def _stack(self) -> str:
        with suppress(ProcessLookupError):
            os.kill(self._id, signal.SIGUSR1)
        return "it prints its stacks to stderr itself"

    def _fate(self) -> str:
        return "its own messages say why"

    def _ask(self, name: str, command: Command) -> Any:
        try:
            pickled = dumps(command)
        except Exception as error:  # boundary: a user's object defines how it is pickled
            raise WorkerError(
                f"{name}: its arguments can't be sent to {self.name}: {error}; leave out what can't be pickled "
                "(locks, open files, connections)"
            ) from error
        try:
            self._connection.send_bytes(pickled)
            data = self._received()
        except (EOFError, OSError):
            self.is_gone = True
            raise WorkerError(f"{name}: {self.name} has ended: {self._fate()}") from None
        reply: Reply = loads(data)
        self._note(reply)
        if reply.error is not None:
            raise reply.error
        return reply.value

    def _note(self, reply: Reply) -> None:
        """Adds what the process's stopwatch noted to the run's stopwatch."""
        for track, what, started, ended, details in reply.spans:
            self._stopwatch.add(track, what, started, ended, **details)
        self._stopwatch.did_tokens(reply.tokens)
        self._stopwatch.num_sampled += reply.num_sampled

    def _received(self) -> bytes:
        """The next reply. Log records and progress that come before it are passed on."""
        while (data := self._connection.recv_bytes()).startswith((RECORD, DONE)):
            if data.startswith(DONE):
                self._stopwatch.did_batch(int(data.removeprefix(DONE)))
            else:
                _log(data.removeprefix(RECORD))
        return data


class ForkedProcess(ConnectedProcess):
    """A process that this one has started, and may kill."""

    _entry = "turnwise.cluster.child:serve"

    def __init__(self, *talk: Any) -> None:
        ours, theirs = Pipe()
        self._stacks, stacks = Pipe(duplex=False)
        self._exit_code: int | None = None
        self._fork_server = prepare_processes()
        super().__init__(ours, self._fork_server.fork(self._entry, [theirs, stacks]), *talk)
        theirs.close()
        stacks.close()

    def _end(self) -> None:
        if not self.is_gone:
            with suppress(ProcessLookupError):
                os.kill(self._id, signal.SIGKILL)
        self._thread.end()
        self._thread.join(_END_S)
        self._reap()
        self._connection.close()
        self._stacks.close()

    def _reap(self) -> None:
        if self._exit_code is None:
            self._exit_code = self._fork_server.reap(self._id)

    def _fate(self) -> str:
        self._reap()
        code = self._exit_code
        if code is None:
            return "it isn't known how"
        if code == -signal.SIGKILL:
            return "something killed it (SIGKILL), as the system does when memory runs out"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _stack(self) -> str:
        while self._stacks.poll(0) and os.read(self._stacks.fileno(), 65_536):
            continue  # drops stacks that other signals have written
        with suppress(ProcessLookupError):
            os.kill(self._id, signal.SIGUSR1)
        text, end = b"", time.monotonic() + _STACK_S
        # The process writes line by line, so the text is complete when nothing more comes.
        while self._stacks.poll(0.2 if text else max(0.0, end - time.monotonic())):
            more = os.read(self._stacks.fileno(), 65_536)
            if not more:
                break
            text += more
        return text.decode() or "it doesn't say"


def unsendable_part(value: Any, name: str, depth: int = 5) -> str:
    """The part of a value that can't be pickled, as `name.attribute`, at most `depth` attributes deep, with its type."""
    is_plain = is_dataclass(value) and not isinstance(value, type)
    names = [field.name for field in fields(value)] if is_plain else []
    parts = {name: getattr(value, name) for name in names} | (vars(value) if "__dict__" in dir(value) else {})
    for part, inner in parts.items() if depth else ():
        try:
            dumps(inner)
        except Exception:  # boundary: a user's object defines how it is pickled
            return unsendable_part(inner, f"{name}.{part}", depth - 1)
    return f"{name} ({type(value).__name__})"


@dataclass(frozen=True, slots=True)
class Started:
    """The future result of a call in another process, as a `protocols.Pending`."""

    name: str
    future: Future[Any]
    process: TrainerProcess

    def result(self) -> Any:
        """Waits while the event loop runs. Raises the call's error, DeadlineError, or WorkerError if the process has ended."""
        return self.process.wait_for(self.name, self)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        try:
            return await asyncio.wrap_future(self.future)
        except asyncio.CancelledError:
            # A call that was waiting behind another one is cancelled and never sent.
            if self.future.cancelled() or not self.future.done():
                self.process.left()
            raise


def _log(pickled: bytes) -> None:
    """Logs a record of the other process in this one."""
    try:
        record: logging.LogRecord = loads(pickled)
    except Exception as error:  # boundary: its `extra` may hold objects of classes that can't be imported here
        logger.warning("A log record of another process can't be read: %s", error)
    else:
        logging.getLogger(record.name).handle(record)
