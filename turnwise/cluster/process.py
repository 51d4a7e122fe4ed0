"""Roles in one process beside this one, which turns the event loop while it waits for them."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from textwrap import indent
from typing import Any

from turnwise.cluster.child import Answer, Ask, Make, Surroundings, serve
from turnwise.cluster.fork_server import CONTEXT, start_process
from turnwise.cluster.local import require_one_device
from turnwise.errors import DeadlineError, WorkerError
from turnwise.protocols import Route
from turnwise.stopwatch import Stopwatch
from turnwise.threads import DaemonThread
from turnwise.watchdog import Watchdog

RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]
_END_S = 60.0
"""That the end of a run waits for a call which still goes on."""
_STACK_S = 0.5
"""After which a process has written where it is, if it can."""
UNSENDABLE = (PicklingError, AttributeError, TypeError)
"""What pickle raises for functions and classes that have no name, and for what lives in one process only."""


@dataclass(frozen=True, slots=True)
class CpuThreads:
    """Threads that an operator uses on either side of a CPU which trainer and rollouts share, and those of both together."""

    train: int
    rollout: int
    both: int


class TrainerProcess:
    """The process, the thread here that talks to it, and what it is stuck in: no call comes after one that is past its
    deadline."""

    def __init__(self, run_async: RunAsync, watchdog: Watchdog, stopwatch: Stopwatch, set_up: Callable[[], None]) -> None:
        self._run_async = run_async
        self._watchdog = watchdog
        self._stopwatch = stopwatch
        self._stuck_in = ""
        self._has_ended = False
        self._connection, theirs = CONTEXT.Pipe()
        self._stacks, their_stacks = CONTEXT.Pipe(duplex=False)
        arguments = (theirs, their_stacks, Surroundings.here(), set_up)
        self._process = CONTEXT.Process(target=serve, args=arguments, name="trainer", daemon=True)
        start_process(self._process)
        theirs.close()
        their_stacks.close()
        # A daemon is asked to end at exit by a signal that it leaves to its parent, and then waited for.
        atexit.register(self._process.kill)
        self._thread = DaemonThread("trainer")

    def start(self, name: str, message: Make | Ask) -> Started:
        """Queues a call.

        Raises:
            DeadlineError: the process doesn't come back from an earlier one.
            WorkerError: it was ended.
        """
        if self._stuck_in:
            raise DeadlineError(f"{name} can't be called: {self._stuck_in} is past its deadline and still goes on")
        if self._has_ended:
            raise WorkerError(f"{name} can't be called: the trainer's process was ended")
        return Started(name, self._thread.start(self._ask, name, message), self)

    def wait_for(self, call: Started, timeout_s: float | None) -> Any:
        """What the call returns. The event loop turns meanwhile, so that everything on it goes on."""
        return self._run_async(self._wait_for(call, timeout_s))

    async def _wait_for(self, call: Started, timeout_s: float | None) -> Any:
        try:
            async with self._watchdog.waiting("the pipeline", call.name, timeout_s, "deadlines.train_s"):
                return await call
        except DeadlineError as fault:
            self._stuck_in = call.name
            raise DeadlineError(f"{fault}\n  the trainer's process:\n{indent(self._stack(), '    ')}") from None

    def end(self) -> None:
        """Ends the process after the call that it is in, unless it is stuck there. Again is harmless."""
        self._has_ended = True
        self._thread.end()
        if not self._stuck_in:
            self._thread.join(_END_S)
        self._process.kill()
        self._process.join()
        self._thread.join(_END_S)
        atexit.unregister(self._process.kill)
        for connection in (self._connection, self._stacks):
            connection.close()

    def _ask(self, name: str, message: Make | Ask) -> Any:
        try:
            pickled = ForkingPickler.dumps(message)
        except UNSENDABLE as error:
            raise WorkerError(
                f"{name}: what it is given can't be sent to the trainer's process: {error}; define classes and functions at "
                "the top of a module, and leave out what can't be pickled"
            ) from error
        try:
            self._connection.send_bytes(pickled)
            answer: Answer = ForkingPickler.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise WorkerError(f"{name}: the trainer's process has ended: {self._fate()}") from None
        for span in answer.spans:
            self._stopwatch.add(span.track, span.name, span.started, span.ended, **span.facts)
        for record in answer.records:
            logging.getLogger(record.name).handle(record)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _fate(self) -> str:
        self._process.join(_END_S)
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return "something killed it (SIGKILL), as the system does where memory runs out"
        return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"

    def _stack(self) -> str:
        """Where the process is."""
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(_STACK_S)
        return os.read(self._stacks.fileno(), 65_536).decode() if self._stacks.poll() else "it doesn't say"


@dataclass(frozen=True, slots=True)
class Started:
    """The Pending of a call in the trainer's process."""

    name: str
    future: Future[Any]
    process: TrainerProcess

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits, while the event loop turns.

        Raises:
            DeadlineError: past `timeout_s`.
            WorkerError: the process has ended.
        """
        return self.process.wait_for(self, timeout_s)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self.future).__await__()


class ProcessWorkers:
    """The one worker of a role, so that `split`, `broadcast` and `rank0` all reach it with the arguments as they are."""

    size = 1

    def __init__(self, role: str, process: TrainerProcess) -> None:
        self._role = role
        self._process = process

    def call(self, method: str, *args: Any, route: Route = "broadcast", **kwargs: Any) -> Started:
        return self._process.start(f"{self._role}.{method}", Ask(self._role, method, args, kwargs))


class ProcessCluster:
    """Spawns each role as one object of one process, whose methods run there in the order in which they were called.

    Arguments and results are pickled. An iterator of `(name, tensor)` pairs comes back as `SharedTensors`, which the next call
    of the same method overwrites. What is logged there is logged here, and what its stopwatch notes `stopwatch` does.

    `run_async` waits for a coroutine on the run's event loop. `set_num_threads` says how many threads the operators use that
    are called from the calling thread: until `shutdown` `num_threads.rollout` here, and there `num_threads.train`, after
    `set_up`.
    """

    def __init__(
        self,
        run_async: RunAsync,
        watchdog: Watchdog,
        stopwatch: Stopwatch,
        num_threads: CpuThreads,
        set_num_threads: Callable[[int], None],
        set_up: Callable[[], object] | None = None,
    ) -> None:
        self.num_threads = num_threads
        self._set_num_threads = set_num_threads
        self._process = TrainerProcess(
            run_async, watchdog, stopwatch, partial(_begin, set_num_threads, num_threads.train, set_up)
        )
        set_num_threads(num_threads.rollout)

    def spawn(self, role: str, factory: Callable[[Stopwatch], Any], devices: Sequence[int] | None = None) -> ProcessWorkers:
        require_one_device(role, devices)
        self._process.start(f"making {role}", Make(role, factory)).result()
        return ProcessWorkers(role, self._process)

    def shutdown(self) -> None:
        """Waits for the call that goes on, if it ends within its deadline."""
        self._set_num_threads(self.num_threads.both)
        self._process.end()


def _begin(set_num_threads: Callable[[int], None], num_threads: int, set_up: Callable[[], object] | None) -> None:
    set_num_threads(num_threads)
    if set_up is not None:
        set_up()
