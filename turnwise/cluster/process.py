"""A process of workers on this machine: its life, and the channel to it."""

from textwrap import indent
from typing import Any

from turnwise.cluster.channel import Channel
from turnwise.cluster.messages import Parcel, Reply
from turnwise.cluster.process_life import ForkedLife, ProcessLife
from turnwise.cluster.wire import ConnectionWire
from turnwise.errors import WorkerError
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.threads import DaemonThread
from turnwise.runtime.watchdog import Wait

_END_S = 60.0  # seconds that the end of a run waits for the thread that talked to a dead process


class WorkerProcess:
    """A process that hosts workers. `name` names it in errors."""

    def __init__(self, name: str, life: ProcessLife, channel: Channel) -> None:
        self.name = name
        self.life = life
        self.channel = channel

    @classmethod
    def fork(cls, name: str, module: str, stopwatch: Stopwatch) -> "WorkerProcess":
        """Starts a process that calls the function `serve` of a module with its ends of a connection and of a
        pipe for its stacks."""
        life = ForkedLife(f"{module}:serve")
        return cls(name, life, Channel(ConnectionWire(life.connection), stopwatch))

    def ask(self, call: str, parcel: Parcel) -> Any:
        """Sends a command, waits for the answer and returns its value, or raises its error. `call` names the
        call in errors. Raises WorkerError if the arguments can't be sent, or the process has ended."""
        try:
            message = parcel.message()
        except Exception as error:  # boundary: a user's object defines how it is pickled
            raise WorkerError(
                f"{call}: its arguments can't be sent to {self.name}: {error}; leave out what can't be "
                "pickled (locks, open files, connections)"
            ) from error
        try:
            self.channel.send(message)
            reply: Reply = self.channel.receive()
        except (EOFError, OSError):
            self.life.is_gone = True
            raise WorkerError(f"{call}: {self.name} has ended: {self.life.fate()}") from None
        return self.channel.value(reply)

    def end(self, thread: DaemonThread) -> None:
        """Ends the process, even in the middle of a call, and `thread`, which talks to it."""
        is_ending = self.life.stop()
        thread.end()
        if is_ending:
            thread.join(_END_S)
        self.life.release()
        self.channel.close()


def add_stacks(wait: Wait, name: str, stacks: str) -> None:
    """Adds the stacks of the process of this name to the report of a wait that is past its deadline."""
    wait.report = f"{wait.report}\n  {name}:\n{indent(stacks, '    ')}"
