"""The calling end of an environment worker."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import Any

from turnwise.cluster.env_child import EnvAnswer, EnvCall
from turnwise.cluster.messages import Command, Parcel, SetUp, pack, parted
from turnwise.cluster.process import WorkerProcess
from turnwise.errors import EnvironmentFault, counted
from turnwise.protocols import Env
from turnwise.runtime.threads import DaemonThread

ENV_CHILD = "turnwise.cluster.env_child"
"""The module that a worker's process runs."""

Waiting = asyncio.Future[Any] | Future[Any]


class EnvWorker:
    """A process that hosts environments of one class. Calls wait until it is set up.

    With `loop`, calls of one tick of this event loop are sent together, and `start` returns futures of the
    loop. Without, each call is sent at once, and its future is for a thread that waits for it. `on_end` is
    called in the worker's thread when the process has ended by itself, and returns the error for the calls
    that wait."""

    def __init__(
        self,
        process: WorkerProcess,
        loop: asyncio.AbstractEventLoop | None,
        on_end: Callable[["EnvWorker", str], Exception],
    ) -> None:
        self.process = process
        self.env_ids: set[int] = set()
        """The environments that live here."""
        self.is_gone = False
        self._loop = loop
        self._on_end = on_end
        self._thread = DaemonThread(process.name)
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, Waiting]] = {}
        self._due: list[EnvCall] = []
        self._sending = Lock()
        self._is_ready = False
        self._has_ended = False

    def begin(self, set_up: SetUp, make_env: Callable[[], Env], is_tried: bool) -> Future[str]:
        """Begins to set up the process. The result is that of `EnvChild.host`, or the exception of the set-
        up."""
        ready: Future[str] = Future()
        self._thread.start(self._serve, set_up, make_env, is_tried, ready)
        return ready

    def start(self, env_id: int, method: str, *args: Any) -> Waiting:
        """Begins a call of an environment. Its error, or EnvironmentFault if the process ends, is the
        future's."""
        number = next(self._numbers)
        answer: Waiting = self._loop.create_future() if self._loop is not None else Future()
        self._waiting[number] = (method, answer)
        with self._sending:
            self._due.append(EnvCall(number, env_id, method, args))
            num_due = len(self._due)
        if self._loop is None:
            self._flush()
        elif num_due == 1:
            self._loop.call_soon(self._flush)
        if self.is_gone:
            self._fail(self._error_of_end())
        return answer

    def kill(self) -> None:
        """Ends the process in the middle of its calls; it counts as having ended by itself."""
        self.process.life.kill()

    def end(self) -> None:
        """Ends the process and what belongs to it. Calling it again is harmless."""
        if not self._has_ended:
            self._has_ended = True
            self.process.end(self._thread)

    def release(self) -> None:
        """Frees what is held for a process that has ended by itself. Called in its thread."""
        self._has_ended = True
        self._thread.end()
        self.process.life.release()
        self.process.channel.close()

    def _flush(self) -> None:
        """Sends the calls that are due. An error shows in the thread that reads as well."""
        with self._sending:
            if not self._is_ready or not self._due:
                return
            calls = self._due
            self._due = []
            with suppress(OSError):
                self.process.channel.send(pack(calls))

    def _serve(
        self,
        set_up: SetUp,
        make_env: Callable[[], Env],
        is_tried: bool,
        ready: Future[str],
    ) -> None:
        """Runs in the thread, for the life of the process."""
        try:
            self.process.ask("its set-up", Parcel(Command("set_up", (set_up,))))
            # While the event loop is blocked by a call, nothing here is more urgent than the answer.
            is_nice = self._loop is not None
            host = Command("host", (make_env, is_nice, is_tried))
            problem = self.process.ask("its first environment", Parcel(host))
        except Exception as error:  # boundary: a user's class is imported there
            self.kill()
            ready.set_exception(error)
            self._end_of_process()
            return
        self._is_ready = True
        ready.set_result(problem)
        self._in_loop(self._flush)
        try:
            while True:
                answers = [EnvAnswer.read(part) for part in parted(self.process.channel.receive_packed())]
                self._in_loop(self._resolve, answers)
        except (
            EOFError,
            OSError,
            TypeError,
        ):  # TypeError: `end` closed the connection in the middle of a read
            self._end_of_process()

    def _end_of_process(self) -> None:
        if self._has_ended:
            return
        self.process.life.is_gone = True
        self.is_gone = True
        error = self._on_end(self, self._story())
        self._in_loop(self._fail, error)

    def _story(self) -> str:
        """How the process ended, and what it was doing."""
        calls = Counter(method for method, _ in list(self._waiting.values()))
        running = ", ".join(f"{number} × {method}" for method, number in sorted(calls.items()))
        environments = counted(len(self.env_ids), "environment")
        return f"{self.process.life.fate()}, with {environments} in it (running: {running or 'no call'})"

    def _error_of_end(self) -> Exception:
        return EnvironmentFault(f"{self.process.name} has ended: {self.process.life.fate()}")

    def _in_loop(self, function: Callable[..., object], *args: Any) -> None:
        """Calls a function on the event loop, or here if futures are for threads."""
        if self._loop is None:
            function(*args)
            return
        with suppress(RuntimeError):  # the run's event loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _resolve(self, answers: list[EnvAnswer]) -> None:
        for number, value, error in answers:
            _, answer = self._waiting.pop(number, ("", None))
            if answer is None or answer.done():
                continue
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

    def _fail(self, error: Exception) -> None:
        self._resolve([EnvAnswer(number, error=error) for number in list(self._waiting)])
