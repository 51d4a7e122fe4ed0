"""Processes that start in milliseconds: forks of one that has imported what they need, and holds no threads, locks or devices.

`multiprocessing`'s forkserver is one for the whole program: its start method, preloads and signal mask would be the user's too,
and a daemon of its may have no children. This one is light to import, so that its imports run beside those of the process that
asks for it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait

from turnwise.errors import NotAvailableError, WorkerError

_FORK, _REAP = b"f", b"r"
_NUMBER = 8
"""Bytes of a number in a message."""
_END_S = 5.0
"""Seconds within which a fork server ends by itself after its connection was closed."""
_ANSWER_S = 600.0
"""Seconds within which a fork server answers; before its first answer it imports."""
_IS_STARTER_THERE_S = 1.0
"""Between two looks at it. A closed connection says it sooner, unless a fork of the starter holds its end."""
_SENT_TO_ALL = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""What a shell or a scheduler may send to all processes of a run: what becomes of the others is the first one's choice."""


class ForkServer:
    """The process that forks, as seen by the process that started it. Killing the starter kills them all."""

    def __init__(self, modules: Sequence[str]) -> None:
        if sys.platform == "win32":
            raise NotAvailableError("async_generation_ratio above 0 needs Unix, whose processes fork; with 0 nothing does")
        self.modules = modules
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_ANSWER_S)
        self._lock = threading.Lock()
        code = (
            f"import sys; sys.path[:] = {[folder for folder in sys.path if isinstance(folder, str)]!r}\n"
            f"from turnwise.cluster.fork_server import main; main({theirs.fileno()}, {os.getpid()}, {list(modules)!r})"
        )
        # Unbuffered, since forks may be killed. In a session of its own, since Ctrl-C in a terminal is for this process alone.
        # Without OpenBLAS's threads, which a fork doesn't have.
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def fork(self, main: str, connections: Sequence[Connection]) -> int:
        """The id of a new process, which calls the function `main` (`module:name`) with its ends of the connections.

        Raises:
            WorkerError: there can be none, since the fork server has ended or doesn't answer.
        """
        try:
            with self._talking():
                socket.send_fds(self._control, [_FORK], [connection.fileno() for connection in connections])
                self._control.sendall(main.encode().ljust(256))
                return self._number()
        except TimeoutError:
            raise WorkerError(
                f"the process that starts others gave no answer within {_ANSWER_S:g} s, in which it imports torch; "
                "async_generation_ratio: 0 needs none"
            ) from None
        except OSError:
            raise WorkerError(
                f"the process that starts others has ended with exit code {self._process.wait()} (-9 where memory runs out), "
                "perhaps with a message above; async_generation_ratio: 0 needs none"
            ) from None

    def reap(self, process_id: int) -> int | None:
        """How a forked process ended, which is waited for: its exit code, or minus a signal; None where nobody knows."""
        try:
            with self._talking():
                self._control.sendall(_REAP + process_id.to_bytes(_NUMBER, "big"))
                return os.waitstatus_to_exitcode(self._number())
        except OSError:
            return None

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """One question and its answer. Left in between, by Ctrl-C as well, nothing can be asked any more."""
        with self._lock:
            try:
                yield
            except BaseException as error:
                if isinstance(error, ConnectionError):
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(_END_S)
                self.kill()
                raise

    def _number(self) -> int:
        data = _exactly(self._control, _NUMBER)
        return int.from_bytes(data, "big")


_fork_servers: dict[int, ForkServer] = {}
"""By the process that has started it: one that was forked from it needs its own."""


def prepare_processes(modules: Sequence[str] = ()) -> ForkServer:
    """The fork server of this process. A new one imports `modules`, or what the one before it had that has ended."""
    fork_server = _fork_servers.get(os.getpid())
    if fork_server is None or not fork_server.is_alive:
        known = fork_server.modules if fork_server is not None else ()
        _fork_servers.clear()
        fork_server = _fork_servers[os.getpid()] = ForkServer(modules or known)
    return fork_server


def drop_processes() -> None:
    """Ends a fork server that still imports, and would only then see that this process is gone."""
    fork_server = _fork_servers.pop(os.getpid(), None)
    if fork_server is not None:
        fork_server.kill()


def main(descriptor: int, starter: int, modules: Sequence[str]) -> None:
    """In the fork server: imports the modules, then forks and reaps as it is asked to, until its starter closes the other end
    or is gone."""
    for name in _SENT_TO_ALL:
        if name in signal.Signals.__members__:
            signal.signal(signal.Signals[name], lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it, and passed that on, can't wait for children
    control = socket.socket(fileno=descriptor)
    for module in modules:
        try:
            import_module(module)
        except Exception:  # boundary: the main process, which imports it as well, says what is wrong with it
            continue
    children: set[int] = set()
    try:
        while True:
            if not wait([control], _IS_STARTER_THERE_S):
                if os.getppid() != starter:
                    return
                continue
            kind, descriptors, *_ = socket.recv_fds(control, 1, 8)
            if kind == _FORK:
                name = _exactly(control, 256).decode().strip()
                child = os.fork()
                if child == 0:
                    control.close()
                    _run(name, descriptors)
                children.add(child)
                for number in descriptors:
                    os.close(number)
                control.sendall(child.to_bytes(_NUMBER, "big"))
            elif kind == _REAP:
                child = int.from_bytes(_exactly(control, _NUMBER), "big")
                _, status = os.waitpid(child, 0)
                children.discard(child)
                control.sendall(status.to_bytes(_NUMBER, "big"))
            else:
                return
    except OSError:
        return
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def _run(name: str, descriptors: Sequence[int]) -> None:
    """In a forked process: calls the function, and ends."""
    status = 1
    try:
        module, _, function = name.partition(":")
        called: Callable[..., None] = getattr(import_module(module), function)
        called(*(Connection(number) for number in descriptors))
        status = 0
    except BaseException:  # boundary: nobody else says what has broken a process
        traceback.print_exc()
    finally:
        os._exit(status)


def _exactly(control: socket.socket, num_bytes: int) -> bytes:
    """
    Raises:
        OSError: the other end is closed.
    """
    data = b""
    while len(data) < num_bytes:
        more = control.recv(num_bytes - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data
