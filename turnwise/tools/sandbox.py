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
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from turnwise.errors import ConfigError, NotAvailableError
from turnwise.tools.jail import ISOLATED, REFUSED

JAIL = Path(__file__).with_name("jail.py")
LOOK_S = 0.05
"""Seconds between two measurements of the folder's size."""
START_S, KILL_S = 60.0, 10.0
"""Time limits in seconds: for a busy machine to start the launcher, and for the kernel to end a killed
process."""
MEBIBYTE = 1 << 20
_MEASURED_SHARE = 0.1
"""Largest share of the time that a run's folder is measured: after a long measurement the next one comes
later."""
_NUM_THREADS = 2
_FILES_BETWEEN_PAUSES, _PAUSE_S = 200, 0.001
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
            kinds, least = (int, float) if name == "timeout_s" else (int,), 64 if name == "memory_mb" else 0
            if (
                not isinstance(value, kinds)
                or isinstance(value, bool)
                or not max(least, 1e-3) <= value <= 1 << 30
            ):
                what = "a number" if float in kinds else "a whole number"
                raise ConfigError(
                    f"{name} is {value!r}; it must be {what}, {f'at least {least}' if least else 'above 0'}"
                )


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
        self._pipe, self._half = pipe, max(size // 2, 1)
        self._begin, self._head, self._tail, self._num_bytes = b"", b"", b"", 0
        self.has_begun, self.has_ended, self.status = asyncio.Event(), asyncio.Event(), 1

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
        taken = self._half - len(self._head)
        self._head += chunk[:taken]
        self._tail = (self._tail + chunk[taken:])[-self._half :] if len(chunk) > taken else self._tail
        return read

    @property
    def first_line(self) -> str:
        return self._begin.decode(errors="replace")

    @property
    def text(self) -> str:
        left_out = self._num_bytes - len(self._head) - len(self._tail)
        middle = f"\n… {left_out:,} bytes left out …\n".encode() if left_out else b""
        return (self._head + middle + self._tail).decode(errors="replace")


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
            said = process.first_line
            if not said.startswith(ISOLATED):
                silence = (
                    "ended and said nothing"
                    if process.has_ended.is_set()
                    else f"said nothing for {START_S:g} s"
                )
                reason = said.removeprefix(REFUSED) or f"its launcher {silence}"
                raise NotAvailableError(f"this system can't isolate Python code of a model: {reason}")
            ended = await _watched(process, folder, limits)
    status, text = process.status, process.text
    outcome: Literal["ok", "error", "timeout", "disk", "killed"]
    if ended == "timeout":
        outcome, text = ended, f"{text}\nThe code ran for longer than {limits.timeout_s:g} s and was ended."
    elif ended == "disk":
        outcome, text = (
            ended,
            f"{text}\nThe code wrote more than {limits.disk_mb} MiB of files and was ended.",
        )
    elif status < 0:
        outcome, text = "killed", f"{text}\nThe code was ended by signal {-status}."
    else:
        outcome = "error" if status else "ok"
    return PythonResult(text, outcome, time.monotonic() - started, said.removeprefix(ISOLATED))


def isolation() -> str:
    """Runs an empty program and says how this system isolates Python code. Raises NotAvailableError if it
    can't isolate it."""
    with ThreadPoolExecutor(1) as pool:  # asyncio.run needs a thread without a running event loop
        return pool.submit(asyncio.run, run_python("")).result().isolation


@asynccontextmanager
async def _launched(folder: str, limits: Limits) -> AsyncIterator[_Process]:
    given = {
        "memory": limits.memory_mb * MEBIBYTE,
        "file": limits.disk_mb * MEBIBYTE // 4,
        "cpu_s": int(limits.timeout_s) + 2,
        "threads": limits.threads,
        "parent": os.getpid(),
    }
    command = [sys.executable, "-I", "-S", "-B", "-u", "-X", "utf8", str(JAIL), folder, json.dumps(given)]
    # Each further malloc arena reserves 64 MiB of address space, and Python waits for ever for a thread that
    # finds no memory for its start (python/cpython#140746).
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "MALLOC_ARENA_MAX": "1",
    }
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        pipe, theirs = os.pipe()
        os.set_blocking(pipe, False)
        stack.callback(os.close, pipe)
        streams = [
            (os.POSIX_SPAWN_DUP2, theirs, 1),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        ]
        try:
            # Unlike subprocess, posix_spawn waits for no pipe, whose other end a process forked elsewhere
            # might hold.
            pid = os.posix_spawn(sys.executable, command, environment, file_actions=streams, setsigmask=())
        finally:
            os.close(theirs)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as fault:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise NotAvailableError(
                f"Python code of a model needs Linux 5.3 or newer: pidfd_open: {fault.strerror}"
            ) from fault
        stack.callback(os.close, pidfd)
        process = _Process(pipe, limits.max_output)

        def on_output() -> None:
            if process.read() == b"":
                loop.remove_reader(pipe)

        def on_end() -> None:
            loop.remove_reader(pidfd)
            while process.read():
                continue  # the pipe still has what was written before the end
            process.has_begun.set()
            process.has_ended.set()

        for file, call in ((pipe, on_output), (pidfd, on_end)):
            loop.add_reader(file, call)
            stack.callback(loop.remove_reader, file)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await _within(KILL_S, process.has_ended)
            with suppress(ChildProcessError):  # somebody else waited for it
                ended, status = os.waitpid(pid, os.WNOHANG)
                process.status = os.waitstatus_to_exitcode(status) if ended else process.status


async def _watched(process: _Process, folder: str, limits: Limits) -> Literal["", "timeout", "disk"]:
    """Waits until the process ends or reaches a limit. Returns the limit that it reached, else ""."""
    deadline, look_s = time.monotonic() + limits.timeout_s, LOOK_S
    while True:
        await _within(min(look_s, max(deadline - time.monotonic(), 0)), process.has_ended)
        has_ended = process.has_ended.is_set()
        size, measured_s = await _in_a_thread(partial(_size, folder, limits.disk_mb * MEBIBYTE))
        if size > limits.disk_mb * MEBIBYTE:
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
    return await asyncio.wrap_future(_threads(os.getpid()).submit(work))


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of this process that measure and remove folders; a forked process has none of its parent's.
    They are few, since each may keep the event loop waiting for Python's lock."""
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="sandbox-files")


async def _within(seconds: float, event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
