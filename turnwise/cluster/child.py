"""The child process: holds the workers of roles and answers calls."""

import faulthandler
import logging
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from typing import Any

from turnwise.cluster.messages import DONE, RECORD, Command, Network, Reply, SetUp, dumps, loads, pack, unpack
from turnwise.cluster.wire import ConnectionWire, Message, Wire
from turnwise.errors import WorkerError
from turnwise.runtime.machine import gloo_interface
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import Stopwatch, TokenCounts
from turnwise.runtime.torch_group import Meeting, form_groups, join_processes, open_store


class BufferedStopwatch(Stopwatch):
    """Keeps its spans for the next Reply. Reports finished micro-batches at once, through `send`."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__()
        self.spans: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self._send = send

    def add(self, track: str, name: str, started: float, ended: float | None = None, **details: Any) -> None:
        self.spans.append((track, name, started, self.now() if ended is None else ended, details))

    def did_batch(self, num_tokens: int) -> None:
        self._send(Message(DONE + b"%d" % num_tokens))


class SentRecords(QueueHandler):
    """Sends log records at once, so that messages before a crash arrive."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._wire = wire

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            pickled = dumps(record)
            loads(pickled)
        except Exception:  # boundary: a record's `extra` may hold anything
            plain = (
                "name",
                "levelno",
                "levelname",
                "msg",
                "created",
                "pathname",
                "lineno",
                "module",
                "filename",
            )
            pickled = dumps(logging.makeLogRecord({name: vars(record)[name] for name in plain}))
        self._wire.send(Message(RECORD + pickled))


def serve(connection: Connection, stacks: Connection) -> None:
    """Answers the messages of a connection one by one, until the other end is closed."""
    answer_all(begin(connection, stacks))


def begin(connection: Connection, stacks: Connection) -> Wire:
    """Prepares a forked process to write its stacks to `stacks` on SIGUSR1, and returns its wire."""
    os.set_blocking(stacks.fileno(), False)  # a cluster scheduler may send SIGUSR1, and then nobody reads
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno())
    return ConnectionWire(connection)


def answer_all(wire: Wire) -> None:
    """Answers messages until the other end is closed. Sends log records too."""
    child = Child(wire)
    while True:
        try:
            wire.send(child.answer(wire.receive()))
        except (EOFError, OSError):
            return


class RoleWorkers:
    """The workers of this process, one per role. They report to `stopwatch`."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.workers: dict[str, Any] = {}
        self._stopwatch = stopwatch

    def make(self, factory: Callable[[RankContext], Any], context: RankContext) -> None:
        """Makes the worker of a role."""
        self.workers[context.role] = factory(
            replace(context, neighbours=dict(self.workers), stopwatch=self._stopwatch)
        )

    def ask(
        self,
        role: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a method of a role's worker and returns the result."""
        return getattr(self.workers[role], method)(*args, **kwargs)

    def check_sendable(self, value: Any) -> None:
        """Does nothing: a call arrives only if its value can be pickled and unpickled."""


class Child(RoleWorkers):
    """Answers the messages of the calling process. The log records of this process go through the wire."""

    def __init__(self, wire: Wire) -> None:
        logging.getLogger().handlers[:] = [SentRecords(wire)]
        logging.captureWarnings(True)
        self.stopwatch = BufferedStopwatch(wire.send)
        super().__init__(self.stopwatch)

    def answer(self, message: Message) -> Message:
        """Runs the Command of a packed message and returns the packed Reply."""
        reply = Reply()
        try:
            command: Command = unpack(message)
            reply.value = getattr(self, command.method)(*command.args)
            reply.spans = self.stopwatch.spans
            reply.tokens = self.stopwatch.tokens
            packed = pack(reply)
        except BaseException as error:  # boundary: the process that waits for the reply gets the exception
            packed = pack(Reply(error=portable(error)))
        self.stopwatch.spans = []
        self.stopwatch.tokens = TokenCounts()
        return packed

    def set_up(self, set_up: SetUp) -> None:
        """Takes over the caller's current folder, `sys.path`, environment and log levels, then calls
        `set_up.function`."""
        if set_up.environment:
            os.environ.clear()
            os.environ.update(set_up.environment)
            sys.path[:] = set_up.path
        else:
            # This Python may be installed elsewhere than the caller's.
            sys.path.extend(folder for folder in set_up.path if folder not in sys.path)
        if not os.path.isdir(set_up.folder):
            raise WorkerError(
                f"{platform.node()} doesn't see {set_up.folder}, where the run was started; start it in a "
                "folder that all nodes share"
            )
        os.chdir(set_up.folder)
        for name, level in set_up.log_levels.items():
            logging.getLogger(name).setLevel(level)
        set_up.function()

    def open_store(self, host: str) -> Meeting:
        """Makes the store where the processes of the run meet, and keeps it. `host` is this node's
        address."""
        self._store = open_store(host)
        return Meeting(host, self._store.port)

    def join(
        self,
        rendezvous: str | Meeting,
        rank: int,
        world_size: int,
        network: Network,
    ) -> None:
        """Joins the processes that meet at `rendezvous`, and forms groups, so that ranks can compute
        together."""
        interface = network.interface
        if network.address and not interface:
            interface = gloo_interface(network.address, "cluster.interface")
        join_processes(rendezvous, rank, world_size, network.device, interface)
        form_groups(network.groups)


def portable(error: BaseException) -> BaseException:
    """The error to send, with its traceback as a note. A WorkerError replaces a StopIteration or an
    unpicklable error."""
    lines = traceback.format_exception(error)
    try:
        if isinstance(error, StopIteration):
            raise WorkerError("a StopIteration can't leave a coroutine")
        copy: BaseException = loads(dumps(error))
        str(copy)
    except Exception:  # boundary: errors of any library
        copy = WorkerError(f"{type(error).__name__}: {_text(error)}")
    copy.add_note(f"raised in another process:\n{''.join(lines)}")
    return copy


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # boundary: errors of any library
        return "its text can't be shown"
