"""The life of a process of workers: how it was started, how it stands, and how it ends."""

import os
import signal
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

from turnwise.cluster.fork_server import prepare_processes

_STACK_S = 5.0  # seconds to wait for the stacks of a process
_QUIET_S = 0.2  # seconds without a further line after which stacks are complete


class ProcessLife(ABC):
    """A process on this machine that hosts workers."""

    process_id: int
    is_gone = False
    """Whether the process has ended by itself."""

    @property
    def is_out_of_reach(self) -> bool:
        """Whether messages to the process or from it don't arrive at the moment."""
        return False

    @property
    def has_lost_node(self) -> bool:
        """Whether the process has ended because its node was lost."""
        return False

    def kill(self) -> None:
        """Ends the process at once, unless it has ended by itself."""
        if not self.is_gone:
            self._signal(signal.SIGKILL)

    @abstractmethod
    def stop(self) -> bool:
        """Makes the process end before its connection is closed. Returns False if it ends only when that is
        closed."""

    @abstractmethod
    def release(self) -> None:
        """Frees what is held for the process, once it ends."""

    @abstractmethod
    def stacks(self) -> str:
        """Where the process's threads stand."""

    @abstractmethod
    def fate(self) -> str:
        """How the process ended."""

    def hidden_output(self) -> str:
        """The last lines that the process wrote to its standard error, if that isn't the run's own."""
        return ""

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process_id, number)


class LaunchedLife(ProcessLife):
    """A process that a launcher has started, on this machine unless `host` names another. It ends when its
    connection is closed."""

    def __init__(self, process_id: int, host: str = "") -> None:
        self.process_id = process_id
        self._host = host

    def stop(self) -> bool:
        return False

    def release(self) -> None: ...

    def stacks(self) -> str:
        if self._host:
            return f"it runs on {self._host}: `kill -USR1 {self.process_id}` there prints them to its stderr"
        self._signal(signal.SIGUSR1)
        return "it prints its stacks to stderr itself"

    def _signal(self, number: int) -> None:
        # Its number may be another process's here.
        if not self._host:
            super()._signal(number)

    def fate(self) -> str:
        return "its own messages say why"


class ForkedLife(ProcessLife):
    """A process that the fork server of this one starts. It calls the function `main` (`module:name`) with
    its end of `connection` and of a pipe for its stacks."""

    def __init__(self, main: str) -> None:
        connection, theirs = Pipe()
        self.connection: Connection = connection
        """This process's end of the connection."""
        self._stacks, stacks = Pipe(duplex=False)
        self._exit_code: int | None = None
        self._fork_server = prepare_processes()
        self.process_id = self._fork_server.fork(main, [theirs, stacks])
        theirs.close()
        stacks.close()

    def stop(self) -> bool:
        self.kill()
        return True

    def release(self) -> None:
        self._reap()
        self._stacks.close()

    def stacks(self) -> str:
        while self._stacks.poll(0) and self._read_stacks():
            continue  # drops stacks that other signals have written
        self._signal(signal.SIGUSR1)
        text = b""
        end = time.monotonic() + _STACK_S
        # The process writes line by line, so the text is complete when nothing more comes.
        while self._stacks.poll(_QUIET_S if text else max(0.0, end - time.monotonic())):
            lines = self._read_stacks()
            if not lines:
                break
            text += lines
        return text.decode() or "it doesn't say"

    def fate(self) -> str:
        self._reap()
        code = self._exit_code
        if code is None:
            return "it isn't known how"
        if code == -signal.SIGKILL:
            return "something killed it (SIGKILL), as the system does when memory runs out"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _reap(self) -> None:
        if self._exit_code is None:
            # What it has started itself, such as an engine's processes, would keep their devices.
            with suppress(ProcessLookupError):
                os.killpg(self.process_id, signal.SIGKILL)
            self._exit_code = self._fork_server.reap(self.process_id)

    def _read_stacks(self) -> bytes:
        return os.read(self._stacks.fileno(), 65_536)
