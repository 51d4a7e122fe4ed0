"""Runs untrusted Python code in a process without network, other processes, or files outside its own folder.
A run ends with its process, which is killed when it reaches a limit. Every wait here has a deadline, and none
waits for the end of the output: a process that was forked elsewhere at the same moment may hold the pipe
open."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from turnwise.errors import ConfigError, NotAvailableError
from turnwise.tools.jail import ISOLATED, REFUSED

JAIL = Path(__file__).with_name("jail.py")
LOOK_S = 0.05
"""Seconds between two measurements of the folder's size."""
START_S = 60.0
"""Maximum seconds that a busy machine takes to start the launcher."""
KILL_S = 10.0
"""Maximum seconds that the kernel takes to end a killed process."""
MEBIBYTE = 1 << 20
_MEASURED_SHARE = 0.1
"""Largest share of the time that a run's folder is measured: after a long measurement the next one comes
later."""
_NUM_THREADS = 2
_FILES_BETWEEN_PAUSES = 200
_PAUSE_S = 0.001
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. Raises ConfigError for a value that isn't allowed."""

    timeout_s: float = 10.0
    """Maximum seconds from the start of the program."""
    memory_mb: int = 512
    """Maximum address space in MiB. Python itself needs about 30; a value below 64 is refused."""
    max_output: int = 20_000
    """Maximum bytes of output that are kept: half from its beginning, half from its end."""
    disk_mb: int = 64
    """Maximum MiB of all files in the program's folder together. A single file may have a quarter of this."""
    threads: int = 32

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            form = "a whole number"
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if name == "timeout_s":
                form = "a number"
                is_number = is_number or isinstance(value, float)
            minimum = 64 if name == "memory_mb" else 0
            if not is_number or not max(minimum, 1e-3) <= value <= 1 << 30:
                bound = f"at least {minimum}" if minimum else "above 0"
                raise ConfigError(f"{name} is {value!r}; it must be {form}, {bound}")


class PythonResult(NamedTuple):
    """How a run ended."""

    text: str
    """stdout and stderr as written, with any traceback. If a limit or a signal ended the run, the last line
    says so."""
    outcome: Literal["ok", "error", "timeout", "disk", "killed"]
    """`error`: an exception, or an exit status that isn't 0. `killed`: a signal, e.g. SIGKILL for too much
    processor time."""
    seconds: float
    isolation: str
    """How the system isolated the process, as text."""


class _Process:
    """A launcher's process: whether it has ended, and with which status (−n for signal n). The first line of
    the output, which is the launcher's own, is kept. Of the rest, at most `size` bytes are kept: half from
    the beginning, half from the end."""

    def __init__(self, pipe: int, size: int) -> None:
        self._pipe = pipe
        self._half = max(size // 2, 1)
        self._begin = b""
        self._head = b""
        self._tail = b""
        self._num_bytes = 0
        self.has_begun = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.status = 1

    def read(self) -> bytes | None:
        """Reads and returns up to 64 KiB of output: empty at its end, None if nothing is available yet."""
        try:
            chunk = read = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return None
        if not self.has_begun.is_set():
            self._begin, newline, chunk = (self._begin + chunk).partition(b"\n")
            if newline:
                self.has_begun.set()
        self._num_bytes += len(chunk)
        room = self._half - len(self._head)
        self._head += chunk[:room]
        if len(chunk) > room:
            tail = self._tail + chunk[room:]
            self._tail = tail[-self._half :]
        return read

    @property
    def first_line(self) -> str:
        return self._begin.decode(errors="replace")

    @property
    def text(self) -> str:
        left_out = self._num_bytes - len(self._head) - len(self._tail)
        output = self._head
        if left_out:
            output += f"\n… {left_out:,} bytes left out …\n".encode()
        output += self._tail
        return output.decode(errors="replace")


async def run_python(code: str, limits: Limits | None = None) -> PythonResult:
    """Runs a program in a fresh process, which sees the standard library and a folder of its own. The process
    has ended when this call returns or is cancelled. Raises NotAvailableError, naming what is missing, if
    this system can't isolate it."""
    if not sys.platform.startswith("linux"):
        raise NotAvailableError(
            f"Python code of a model needs Linux (Landlock and seccomp), and this is {sys.platform}"
        )
    limits = limits or Limits()
    started = time.monotonic()
    async with _folder() as folder:
        Path(folder, "main.py").write_text(code, encoding="utf-8", errors="replace")
        async with _launched(folder, limits) as process:
            # Until its first line the process runs only the launcher, which a busy machine may delay.
            await _within(START_S, process.has_begun)
            answer = process.first_line
            if not answer.startswith(ISOLATED):
                silence = f"said nothing for {START_S:g} s"
                if process.has_ended.is_set():
                    silence = "ended and said nothing"
                reason = answer.removeprefix(REFUSED) or f"its launcher {silence}"
                raise NotAvailableError(f"this system can't isolate Python code of a model: {reason}")
            limit = await _watched(process, folder, limits)
    text = process.text
    outcome: Literal["ok", "error", "timeout", "disk", "killed"] = "ok"
    if limit == "timeout":
        outcome = limit
        text += f"\nThe code ran for longer than {limits.timeout_s:g} s and was ended."
    elif limit == "disk":
        outcome = limit
        text += f"\nThe code wrote more than {limits.disk_mb} MiB of files and was ended."
    elif process.status < 0:
        outcome = "killed"
        text += f"\nThe code was ended by signal {-process.status}."
    elif process.status:
        outcome = "error"
    return PythonResult(text, outcome, time.monotonic() - started, answer.removeprefix(ISOLATED))


def isolation() -> str:
    """Runs an empty program and says how this system isolates Python code. Raises NotAvailableError if it
    can't isolate it."""
    with ThreadPoolExecutor(1) as pool:  # asyncio.run needs a thread without a running event loop
        return pool.submit(asyncio.run, run_python("")).result().isolation


@asynccontextmanager
async def _launched(folder: str, limits: Limits) -> AsyncIterator[_Process]:
    with ExitStack() as stack:
        pipe, their_end = os.pipe()
        os.set_blocking(pipe, False)
        stack.callback(os.close, pipe)
        try:
            pid = _spawned(folder, limits, their_end)
        finally:
            os.close(their_end)
        pidfd = _descriptor_of(pid)
        stack.callback(os.close, pidfd)
        process = _Process(pipe, limits.max_output)
        stack.enter_context(_observed(process, pipe, pidfd))
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await _within(KILL_S, process.has_ended)
            with suppress(ChildProcessError):  # somebody else waited for it
                ended_pid, status = os.waitpid(pid, os.WNOHANG)
                if ended_pid:
                    process.status = os.waitstatus_to_exitcode(status)


def _spawned(folder: str, limits: Limits, output: int) -> int:
    """Starts the launcher, whose output goes to the descriptor `output`, and returns its process id."""
    limits_of_jail = {
        "memory": limits.memory_mb * MEBIBYTE,
        "file": limits.disk_mb * MEBIBYTE // 4,
        "cpu_s": int(limits.timeout_s) + 2,
        "threads": limits.threads,
        "parent": os.getpid(),
    }
    options = ["-I", "-S", "-B", "-u", "-X", "utf8"]
    command = [sys.executable, *options, str(JAIL), folder, json.dumps(limits_of_jail)]
    # Each further malloc arena reserves 64 MiB of address space, and Python waits for ever for a thread that
    # finds no memory for its start (python/cpython#140746).
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "MALLOC_ARENA_MAX": "1",
    }
    streams = [
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, 1, 2),
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
    ]
    # Unlike subprocess, posix_spawn waits for no pipe, whose other end a process forked elsewhere might hold.
    return os.posix_spawn(
        sys.executable,
        command,
        environment,
        file_actions=streams,
        setsigmask=(),
    )


def _descriptor_of(pid: int) -> int:
    """A file descriptor of a process. Ends the process if the system has none."""
    try:
        return os.pidfd_open(pid)
    except OSError as fault:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise NotAvailableError(
            f"Python code of a model needs Linux 5.3 or newer: pidfd_open: {fault.strerror}"
        ) from fault


@contextmanager
def _observed(process: _Process, pipe: int, pidfd: int) -> Iterator[None]:
    """Reads the output as it comes, and notes the end of the process."""
    loop = asyncio.get_running_loop()

    def on_output() -> None:
        if process.read() == b"":
            loop.remove_reader(pipe)

    def on_end() -> None:
        loop.remove_reader(pidfd)
        while process.read():
            continue  # the pipe still has what was written before the end
        process.has_begun.set()
        process.has_ended.set()

    try:
        loop.add_reader(pipe, on_output)
        loop.add_reader(pidfd, on_end)
        yield
    finally:
        loop.remove_reader(pidfd)
        loop.remove_reader(pipe)


async def _watched(process: _Process, folder: str, limits: Limits) -> Literal["", "timeout", "disk"]:
    """Waits until the process ends or reaches a limit. Returns the limit that it reached, else ""."""
    deadline = time.monotonic() + limits.timeout_s
    max_size = limits.disk_mb * MEBIBYTE
    look_s = LOOK_S
    while True:
        remaining_s = max(deadline - time.monotonic(), 0)
        await _within(min(look_s, remaining_s), process.has_ended)
        has_ended = process.has_ended.is_set()
        size, measured_s = await _in_a_thread(partial(_size, folder, max_size))
        if size > max_size:
            return "disk"
        if has_ended:
            return ""
        look_s = max(LOOK_S, measured_s / _MEASURED_SHARE)
        if time.monotonic() >= deadline:
            return "timeout"


def _size(folder: str, limit: int) -> tuple[int, float]:
    """The bytes of all files in a folder, 4 KiB a file added, and the processor time in seconds that
    measuring took. Stops above `limit`, so that it looks at no more than `limit` / 4 KiB files."""
    started = time.thread_time()
    size = 0
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries, start=1):
            if number % _FILES_BETWEEN_PAUSES == 0:
                time.sleep(_PAUSE_S)  # lets the event loop have Python's lock
            with suppress(FileNotFoundError):  # the code deletes files too
                size += entry.stat(follow_symlinks=False).st_blocks * 512 + 4096
            if size > limit:
                break
    return size, time.thread_time() - started


@asynccontextmanager
async def _folder() -> AsyncIterator[str]:
    """A new folder, which is removed in the end, in a thread: a program may leave many thousand files
    there."""
    folder = tempfile.mkdtemp(prefix="turnwise-python-")
    try:
        yield folder
    finally:
        await _in_a_thread(partial(shutil.rmtree, folder, ignore_errors=True))


async def _in_a_thread(work: Callable[[], T]) -> T:
    # Not the event loop's own threads, which rewards and tools may keep busy.
    future = _threads(os.getpid()).submit(work)
    return await asyncio.wrap_future(future)


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of this process that measure and remove folders; a forked process has none of its parent's.
    They are few, since each may keep the event loop waiting for Python's lock."""
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="sandbox-files")


async def _within(seconds: float, event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
