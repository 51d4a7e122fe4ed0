"""What runs in a process of its own: the workers of roles, and the answers to calls."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from turnwise.cluster.fork_server import ENDS_A_GROUP
from turnwise.cluster.shared_tensors import SharedTensors
from turnwise.errors import WorkerError
from turnwise.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class Span:
    """What a stopwatch has noted."""

    track: str
    name: str
    started: float
    ended: float
    facts: dict[str, Any]


class KeptStopwatch(Stopwatch):
    """Keeps its spans until they are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []

    def add(self, track: str, name: str, started: float, ended: float | None = None, **facts: Any) -> None:
        self.spans.append(Span(track, name, started, self.now() if ended is None else ended, facts))


class KeptRecords(QueueHandler):
    """Keeps log records until they are sent."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.records: list[logging.LogRecord] = []

    def enqueue(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process takes over from the one that starts it, besides `sys.path` and the working directory."""

    environment: dict[str, str]
    log_levels: dict[str, int]
    """Of the loggers by these names."""

    @classmethod
    def here(cls) -> Surroundings:
        return cls(dict(os.environ), {name: logging.getLogger(name).level for name in ("", "turnwise")})

    def take_over(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        for name, level in self.log_levels.items():
            logging.getLogger(name).setLevel(level)


@dataclass(frozen=True, slots=True)
class Make:
    """Makes a role's worker: `factory` gets the stopwatch of this process."""

    role: str
    factory: Callable[[Stopwatch], Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """Calls a method of a role's worker."""

    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class Answer:
    """What came of a message, and what was noted and logged meanwhile."""

    value: Any = None
    error: BaseException | None = None
    spans: list[Span] = field(default_factory=list)
    records: list[logging.LogRecord] = field(default_factory=list)


def serve(connection: Connection, stacks: Connection, surroundings: Surroundings, set_up: Callable[[], None]) -> None:
    """Answers the messages of a connection, one after the other, until its other end is closed. On SIGUSR1 the stacks of this
    process are written to `stacks`."""
    for number in ENDS_A_GROUP:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno())
    surroundings.take_over()
    child = Child(set_up)
    while True:
        try:
            connection.send_bytes(child.answer(connection.recv_bytes()))
        except (EOFError, OSError):
            return


class Child:
    """The workers by their roles."""

    def __init__(self, set_up: Callable[[], None]) -> None:
        self._workers: dict[str, Any] = {}
        self._shared: dict[tuple[str, str], SharedTensors] = {}
        self._stopwatch = KeptStopwatch()
        self._log = KeptRecords()
        logging.getLogger().handlers[:] = [self._log]
        set_up()

    def answer(self, message: bytes) -> Any:
        """The pickled Answer to a pickled message."""
        answer = Answer()
        try:
            answer.value = self._value(ForkingPickler.loads(message))
            ForkingPickler.dumps(answer.value)
        except BaseException as error:  # boundary: the process that waits for the answer gets what was raised
            answer.value, answer.error = None, portable(error)
        finally:
            answer.spans, self._stopwatch.spans = self._stopwatch.spans, []
            answer.records, self._log.records = self._log.records, []
            sys.stdout.flush()
        return ForkingPickler.dumps(answer)

    def _value(self, message: Make | Ask) -> Any:
        if isinstance(message, Make):
            self._workers[message.role] = message.factory(self._stopwatch)
            return None
        value = getattr(self._workers[message.role], message.method)(*message.args, **message.kwargs)
        return self._in_shared_memory((message.role, message.method), value) if isinstance(value, Iterator) else value

    def _in_shared_memory(self, source: tuple[str, str], tensors: Iterator[Any]) -> SharedTensors:
        if source not in self._shared:
            first = list(tensors)
            self._shared[source] = SharedTensors.like(first)
            tensors = iter(first)
        self._shared[source].write(tensors)
        return self._shared[source]


def portable(error: BaseException) -> BaseException:
    """The error, or one that says the same where it can't be pickled, with where it was raised."""
    where = "".join(traceback.format_exception(error))
    try:
        copy = ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        copy = WorkerError(f"{type(error).__name__}: {error}")
    copy.add_note(f"raised in the trainer's process:\n{where}")
    return copy
