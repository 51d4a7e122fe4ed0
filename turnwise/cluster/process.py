"""Roles in one other process. This process turns its event loop while it waits for them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from multiprocessing.connection import Connection
from textwrap import indent
from typing import Any

from turnwise.cluster.fork_server import prepare_processes
from turnwise.cluster.local import require_one_device
from turnwise.cluster.messages import DONE, RECORD, Command, Reply, SetUp, Shared, dumps, loads
from turnwise.cluster.shared_tensors import SharedTensors
from turnwise.errors import DeadlineError, WorkerError
from turnwise.protocols import Route
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.threads import DaemonThread
from turnwise.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]
_END_S = 60.0
"""Seconds that the end of a run waits for the thread that talked to a dead process."""
_STACK_S = 5.0
"""Seconds to wait for the stacks of a process."""


@dataclass(frozen=True, slots=True)
class CpuThreads:
    """Operator threads of trainer and rollouts on a shared CPU, and of both together."""

    train: int
    rollout: int
    both: int


class TrainerProcess:
    """The process, and this process's thread that talks to it. A call past its deadline (the caller's, or `deadline_s`) blocks
    new calls until it returns."""

    def __init__(self, run_async: RunAsync, watchdog: Watchdog, stopwatch: Stopwatch, deadline_s: float | None) -> None:
        self._run_async = run_async
        self._watchdog = watchdog
        self._stopwatch = stopwatch
        self._deadline_s = deadline_s
        self._busy_with = ""
        """The call that was sent to the process and isn't answered yet."""
        self._late = ""
        """A call that was past its deadline."""
        self._has_ended = False
        self._is_gone = False
        self._exit_code: int | None = None
        self._shared: dict[tuple[str, str], SharedTensors] = {}
        ours, theirs = socket.socketpair()
        readable, writable = os.pipe()
        self._connection, connection = Connection(ours.detach()), Connection(theirs.detach())
        self._stacks, stacks = Connection(readable, writable=False), Connection(writable, readable=False)
        self._fork_server = prepare_processes()
        self._id = self._fork_server.fork("turnwise.cluster.child:serve", [connection, stacks])
        connection.close()
        stacks.close()
        self._thread = DaemonThread("trainer")

    def start(self, name: str, command: Command) -> Started:
        """Queues a call.

        Raises:
            DeadlineError: the process doesn't come back from an earlier one.
            WorkerError: it was ended.
        """
        if self._late and self._late == self._busy_with:
            raise DeadlineError(f"{name} can't be called: {self._late} is past its deadline and still runs")
        if self._has_ended:
            raise WorkerError(f"{name} can't be called: the trainer's process was ended")
        return Started(name, self._thread.start(self._ask, name, command), self)

    def wait_for(self, call: Started) -> Any:
        """The result of the call. The event loop turns meanwhile."""
        return self._run_async(self._wait_for(call))

    async def _wait_for(self, call: Started) -> Any:
        async with self._watchdog.waiting("the pipeline", call.name, self._deadline_s, "deadlines.train_s"):
            return await call

    def left(self) -> None:
        """Abandons an unfinished call. If its deadline has passed, the error shows the process's stacks."""
        wait = self._watchdog.expired()
        if wait is not None:
            self._late = self._busy_with
            wait.report = f"{wait.report}\n  the trainer's process:\n{indent(self._stack(), '    ')}"

    def end(self) -> None:
        """Ends the process, whatever it does: callers have already waited for their answers. Calling it again is harmless."""
        if self._has_ended:
            return
        self._has_ended = True
        if not self._is_gone:
            with suppress(ProcessLookupError):
                os.kill(self._id, signal.SIGKILL)
        self._thread.end()
        self._thread.join(_END_S)
        self._reap()
        self._connection.close()
        self._stacks.close()

    def _ask(self, name: str, command: Command) -> Any:
        try:
            pickled = dumps(command)
        except Exception as error:  # boundary: whatever a user's object says of how it is pickled
            raise WorkerError(
                f"{name}: what it is given can't be sent to the trainer's process: {error}; leave out what can't be pickled "
                "(locks, open files, connections)"
            ) from error
        answer = self._answer(name, pickled)
        for track, what, started, ended, details in answer.spans:
            self._stopwatch.add(track, what, started, ended, **details)
        if answer.error is not None:
            raise answer.error
        return self._mapped(answer.value) if isinstance(answer.value, Shared) else answer.value

    def _answer(self, name: str, pickled: bytes) -> Reply:
        self._busy_with = name
        try:
            self._connection.send_bytes(pickled)
            while (data := self._connection.recv_bytes()).startswith((RECORD, DONE)):
                if data.startswith(DONE):
                    self._stopwatch.did_batch(int(data.removeprefix(DONE)))
                else:
                    _log(data.removeprefix(RECORD))
        except (EOFError, OSError):
            self._is_gone = True
            raise WorkerError(f"{name}: the trainer's process has ended: {self._fate()}") from None
        finally:
            self._busy_with = ""
        answer: Reply = loads(data)
        return answer

    def _mapped(self, shared: Shared) -> SharedTensors:
        if shared.places is not None:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                _, [descriptor], *_ = socket.recv_fds(end, 1, 1)
            self._shared[shared.source] = SharedTensors(descriptor, shared.num_bytes, shared.places)
            os.close(descriptor)
        return self._shared[shared.source]

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
        """The stacks of the process."""
        while self._stacks.poll(0) and os.read(self._stacks.fileno(), 65_536):
            continue  # drops stacks that somebody else's signal wrote
        with suppress(ProcessLookupError):
            os.kill(self._id, signal.SIGUSR1)
        text, end = b"", time.monotonic() + _STACK_S
        # It writes line by line, so the text is whole when nothing more comes.
        while self._stacks.poll(0.2 if text else max(0.0, end - time.monotonic())):
            more = os.read(self._stacks.fileno(), 65_536)
            if not more:
                break
            text += more
        return text.decode() or "it doesn't say"


def unsendable_part(value: Any, name: str, depth: int = 5) -> str:
    """The part of a value, `name.attribute` or deeper, that can't be pickled, with its type."""
    is_plain = is_dataclass(value) and not isinstance(value, type)
    names = [field.name for field in fields(value)] if is_plain else []
    parts = {name: getattr(value, name) for name in names} | (vars(value) if "__dict__" in dir(value) else {})
    for part, inner in parts.items() if depth else ():
        try:
            dumps(inner)
        except Exception:  # boundary: whatever a user's object says of how it is pickled
            return unsendable_part(inner, f"{name}.{part}", depth - 1)
    return f"{name} ({type(value).__name__})"


@dataclass(frozen=True, slots=True)
class Started:
    """The Pending of a call in the trainer's process."""

    name: str
    future: Future[Any]
    process: TrainerProcess

    def result(self) -> Any:
        """Waits, while the event loop turns.

        Raises:
            DeadlineError: past the cluster's deadline.
            WorkerError: the process has ended.
        """
        return self.process.wait_for(self)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        try:
            return await asyncio.wrap_future(self.future)
        except asyncio.CancelledError:
            # A call that waits behind another is cancelled and never made.
            if self.future.cancelled() or not self.future.done():
                self.process.left()
            raise


class ProcessWorkers:
    """The one worker of a role, so that `split`, `broadcast` and `rank0` all reach it with the arguments as they are."""

    size = 1

    def __init__(self, role: str, process: TrainerProcess) -> None:
        self._role = role
        self._process = process

    def call(self, method: str, *args: Any, route: Route = "broadcast", **kwargs: Any) -> Started:
        return self._process.start(f"{self._role}.{method}", Command("ask", (self._role, method, args, kwargs)))


class ProcessCluster:
    """Spawns each role as one object of one process, whose methods run there in the order in which they were called.

    Arguments and results are pickled. An iterator of `(name, tensor)` pairs comes back as `SharedTensors`, which the next call
    of the same method overwrites; the first makes the iterator twice. Its log records are logged here, and its stopwatch's
    notes go to `stopwatch`. No call takes longer than `deadline_s`.

    `run_async` waits for a coroutine on the run's event loop. `set_num_threads` sets the number of operator threads of the
    calling thread: until `shutdown` `num_threads.rollout` here, and there `num_threads.train`. `set_up` is called there first.
    """

    def __init__(
        self,
        run_async: RunAsync,
        watchdog: Watchdog,
        stopwatch: Stopwatch,
        num_threads: CpuThreads,
        set_num_threads: Callable[[int], None],
        set_up: Callable[[], object] | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.num_threads = num_threads
        self._set_num_threads = set_num_threads
        self._process = TrainerProcess(run_async, watchdog, stopwatch, deadline_s)
        with ExitStack() as on_error:
            on_error.callback(self._process.end)
            begin = partial(_begin, set_num_threads, num_threads.train, set_up)
            levels = {name: logging.getLogger(name).level for name in ("", "turnwise")}
            set_up_child = SetUp(dict(os.environ), list(sys.path), os.getcwd(), levels, begin)
            self._process.start("setting up the trainer's process", Command("set_up", (set_up_child,))).result()
            on_error.pop_all()
        set_num_threads(num_threads.rollout)

    def spawn(self, role: str, factory: Callable[[Stopwatch], Any], devices: Sequence[int] | None = None) -> ProcessWorkers:
        require_one_device(role, devices)
        self._process.start(f"making {role}", Command("make", (role, factory))).result()
        return ProcessWorkers(role, self._process)

    def take(self, value: Any) -> None:
        """Sends a value there, to find out early whether it can arrive.

        Raises:
            Exception: whatever pickle raises, on either side.
        """
        self._process.start("a trial", Command("take", (value,))).result()

    def shutdown(self) -> None:
        """Ends the process without waiting for its running call."""
        self._set_num_threads(self.num_threads.both)
        self._process.end()


def _log(pickled: bytes) -> None:
    """Logs the process's records here."""
    try:
        record: logging.LogRecord = loads(pickled)
    except Exception as error:  # boundary: what was put into its `extra` may be of classes that aren't known here
        logger.warning("A log record of the trainer's process can't be read: %s", error)
    else:
        logging.getLogger(record.name).handle(record)


def _begin(set_num_threads: Callable[[int], None], num_threads: int, set_up: Callable[[], object] | None) -> None:
    set_num_threads(num_threads)
    if set_up is not None:
        set_up()
