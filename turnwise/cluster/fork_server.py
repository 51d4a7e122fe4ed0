"""Starts processes in milliseconds, by forking one that has imported their modules and holds no threads,
locks or devices. The forkserver of `multiprocessing` isn't used, since users' code shares its start method,
preloads and signal mask, and its daemonic processes may have no children. This module imports little, so a
fork server can be started early."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle

from turnwise.errors import NotAvailableError, WorkerError

_END_S = 5.0  # seconds until a fork server ends by itself after its connection is closed
_ANSWER_S = 600.0  # seconds to wait for a fork server's answer, imports included
_IS_STARTER_THERE_S = 1.0
"""Seconds between two checks that the starter lives. Usually its end shows sooner, as a closed connection."""
_SENT_TO_ALL = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that a shell or a cluster scheduler may send to all processes of a run. Only the main process acts
on them."""


class ForkServer:
    """Starts a fork server and talks to it. If this process dies, all forked processes are killed."""

    def __init__(self, modules: Sequence[str]) -> None:
        if sys.platform == "win32":
            raise NotAvailableError(
                "this run forks processes, which needs Unix; set async_generation_ratio to 0 and "
                "device_mapping to one device"
            )
        self.modules = modules
        self._control, theirs = Pipe()
        self._lock = threading.Lock()
        self._exit_codes: dict[int, int] = {}  # by process id; the system tells each exit code only once
        code = (
            f"import sys; sys.path[:] = {[folder for folder in sys.path if isinstance(folder, str)]!r}\n"
            f"from turnwise.cluster.fork_server import main; main({theirs.fileno()}, {os.getpid()}, "
            f"{list(modules)!r})"
        )
        # Unbuffered, since forks may be killed. In its own session, since only this process may get a
        # terminal's Ctrl-C. Without OpenBLAS's threads, which don't survive a fork.
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
        """Starts a process that calls the function `main` (`module:name`) with copies of the connections.
        Returns the process's id. Raises WorkerError if the fork server has ended or doesn't answer."""
        try:
            with self._talking():
                self._control.send((main, len(connections)))
                for connection in connections:
                    send_handle(self._control, connection.fileno(), self._process.pid)
                return self._answer()
        except TimeoutError:
            raise WorkerError(
                f"the process that starts others imports torch and didn't answer within {_ANSWER_S:g} s; "
                "async_generation_ratio: 0 on one device needs no such process"
            ) from None
        except (OSError, EOFError):
            raise WorkerError(
                f"the process that starts others has ended with exit code {self._process.wait()} (-9 if "
                "memory ran out); there may be a message above; async_generation_ratio: 0 on one device "
                "needs no such process"
            ) from None

    def remove_at_end(self, folder: str) -> None:
        """Makes the fork server remove a folder of its forks when this process dies, however it dies."""
        with suppress(OSError), self._talking():
            self._control.send(folder)

    def reap(self, process_id: int) -> int | None:
        """Waits for a forked process. Returns its exit code, −N if signal N ended it, or None if the code is
        unknown. Thread-safe."""
        try:
            with self._talking():
                if process_id not in self._exit_codes:
                    self._control.send(process_id)
                    self._exit_codes[process_id] = os.waitstatus_to_exitcode(self._answer())
                return self._exit_codes[process_id]
        except (OSError, EOFError):
            return None

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Wraps one request and its answer. An exception kills the fork server, or the next request could get
        this answer."""
        with self._lock:
            try:
                yield
            except BaseException as error:
                if isinstance(error, ConnectionError | EOFError):
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(_END_S)
                self.kill()
                raise

    def _answer(self) -> int:
        if not self._control.poll(_ANSWER_S):
            raise TimeoutError
        return int(self._control.recv())


_fork_servers: dict[
    int, ForkServer
] = {}  # fork servers by starting process: a fork of that process needs its own
_starting = threading.Lock()
"""Held while a fork server starts: of two that threads start at once, one would have no owner, and its
children would end."""


def prepare_processes(modules: Sequence[str] = ()) -> ForkServer:
    """Returns this process's fork server. If none is alive, starts one that imports `modules` (default: its
    predecessor's). Thread-safe."""
    with _starting:
        fork_server = _fork_servers.get(os.getpid())
        if fork_server is None or not fork_server.is_alive:
            predecessors_modules = fork_server.modules if fork_server is not None else ()
            _fork_servers.clear()
            fork_server = ForkServer(modules or predecessors_modules)
            _fork_servers[os.getpid()] = fork_server
        return fork_server


def drop_processes() -> None:
    """Ends the fork server, which may still be importing and would notice the end of this process only
    later."""
    with _starting:
        fork_server = _fork_servers.pop(os.getpid(), None)
    if fork_server is not None:
        fork_server.kill()


def main(descriptor: int, starter: int, modules: Sequence[str]) -> None:
    """Runs in the fork server: imports the modules, then forks and reaps on request, until the starter is
    gone."""
    for name in _SENT_TO_ALL:
        if name in signal.Signals.__members__:
            signal.signal(signal.Signals[name], lambda *_: None)
    # The parent may ignore SIGCHLD and pass that on; then waiting for children would fail.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control = Connection(descriptor)
    for module in modules:
        try:
            import_module(module)
        except Exception:  # boundary: the main process imports the module too and reports its error
            continue
    children: set[int] = set()
    folders: list[str] = []
    try:
        while True:
            if not control.poll(_IS_STARTER_THERE_S):
                if os.getppid() != starter:
                    return
                continue
            match control.recv():
                case name, num_connections:
                    descriptors = [recv_handle(control) for _ in range(num_connections)]
                    child = os.fork()
                    if child == 0:
                        control.close()
                        _run(name, descriptors)
                    children.add(child)
                    for number in descriptors:
                        os.close(number)
                    control.send(child)
                case str(folder):
                    folders.append(folder)
                case child:
                    _, status = os.waitpid(child, 0)
                    children.discard(child)
                    control.send(status)
    except (OSError, EOFError):
        return
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _run(name: str, descriptors: Sequence[int]) -> None:
    """Runs in a forked process: calls the function and exits."""
    status = 1
    try:
        module, _, function = name.partition(":")
        called: Callable[..., None] = getattr(import_module(module), function)
        called(*(Connection(number) for number in descriptors))
        status = 0
    except BaseException:  # boundary: nobody else would report the error
        traceback.print_exc()
    finally:
        os._exit(status)
