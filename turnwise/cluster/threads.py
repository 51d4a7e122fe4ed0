"""Roles in one thread beside the main one, which turns the event loop while it waits for them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnwise.cluster.local import require_one_device
from turnwise.errors import DeadlineError
from turnwise.protocols import Route
from turnwise.threads import DaemonThread
from turnwise.watchdog import Watchdog

RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]
_END_S = 60.0
"""That the end of a run waits for a call which still goes on."""
_SWITCH_S = 5e-4
"""After which a thread that runs Python lets the other one do so: with Python's own 5 ms a trainer that needs the interpreter
for microseconds between two operators waits for the end of what an agent does."""


@dataclass(frozen=True, slots=True)
class CpuThreads:
    """Threads that an operator uses on either side of a CPU which trainer and rollouts share, and those of both together."""

    train: int
    rollout: int
    both: int


class TrainerThread:
    """The thread, and what it is stuck in: a call that is past its deadline can't be ended, and none comes after it."""

    def __init__(self, run_async: RunAsync, watchdog: Watchdog) -> None:
        self._run_async = run_async
        self._watchdog = watchdog
        self._thread = DaemonThread("trainer")
        self._stuck_in = ""

    def start(self, name: str, function: Callable[[], Any]) -> Started:
        """Queues a call.

        Raises:
            DeadlineError: the thread doesn't come back from an earlier one.
        """
        if self._stuck_in:
            raise DeadlineError(f"{name} can't be called: {self._stuck_in} is past its deadline and still goes on")
        return Started(name, self._thread.start(function), self)

    def wait_for(self, call: Started, timeout_s: float | None) -> Any:
        """What the call returns. The event loop turns meanwhile, so that everything on it goes on."""
        return self._run_async(self._wait_for(call, timeout_s))

    async def _wait_for(self, call: Started, timeout_s: float | None) -> Any:
        try:
            async with self._watchdog.waiting("the pipeline", call.name, timeout_s, "deadlines.train_s"):
                return await asyncio.wrap_future(call.future)
        except DeadlineError:
            self._stuck_in = call.name
            raise

    def end(self) -> None:
        """Ends the thread after the call that it is in, and waits for that unless it is stuck there."""
        self._thread.end()
        if not self._stuck_in:
            self._thread.join(_END_S)


@dataclass(frozen=True, slots=True)
class Started:
    """The Pending of a call in the trainer's thread."""

    name: str
    future: Future[Any]
    thread: TrainerThread

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits, while the event loop turns.

        Raises:
            DeadlineError: past `timeout_s`.
        """
        return self.thread.wait_for(self, timeout_s)


class ThreadWorkers:
    """The one worker of a role, so that `split`, `broadcast` and `rank0` all reach it with the arguments as they are."""

    size = 1

    def __init__(self, role: str, worker: Any, thread: TrainerThread) -> None:
        self.worker = worker
        self._role = role
        self._thread = thread

    def call(self, method: str, *args: Any, route: Route = "broadcast", **kwargs: Any) -> Started:
        return self._thread.start(f"{self._role}.{method}", partial(getattr(self.worker, method), *args, **kwargs))


class ThreadCluster:
    """Spawns each role as one object here, whose methods run in one thread, in the order in which they were called.

    `run_async` waits for a coroutine on the run's event loop. `set_num_threads` says how many threads the operators use that
    are called from the calling thread: until `shutdown` `num_threads.train` in the trainer's, `num_threads.rollout` here.
    """

    def __init__(
        self, run_async: RunAsync, watchdog: Watchdog, num_threads: CpuThreads, set_num_threads: Callable[[int], None]
    ) -> None:
        self.num_threads = num_threads
        self._set_num_threads = set_num_threads
        self._thread = TrainerThread(run_async, watchdog)
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_S, self._switch_s))
        self._thread.start("set_num_threads", partial(set_num_threads, num_threads.train)).future.result()
        set_num_threads(num_threads.rollout)

    def spawn(self, role: str, factory: Callable[[], Any], devices: Sequence[int] | None = None) -> ThreadWorkers:
        require_one_device(role, devices)
        return ThreadWorkers(role, factory(), self._thread)

    def shutdown(self) -> None:
        """Waits for the call that goes on, if it ends within its deadline."""
        self._set_num_threads(self.num_threads.both)
        sys.setswitchinterval(self._switch_s)
        self._thread.end()
