"""Runs Python text that nobody trusts: in a process without network, other processes, or files outside its own folder."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from turnwise.errors import NotAvailableError

log = logging.getLogger(__name__)

JAIL = Path(__file__).with_name("jail.py")
LOOK_S = 0.05
"""Seconds between two looks at the folder's size."""
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. Other processes it may never start."""

    timeout_s: float = 10.0
    memory_mb: int = 512
    """Address space in MiB; Python itself takes about 30."""
    max_output: int = 20_000
    """Bytes of output that are kept: the first and the last half of them."""
    disk_mb: int = 64
    """MiB of all files in its folder; a single one may have a quarter of it."""
    threads: int = 32


class PythonResult(NamedTuple):
    """What became of a run."""

    text: str
    """stdout and stderr as they were written, with the traceback; a sentence at its end says why it was ended."""
    outcome: Literal["ok", "error", "timeout", "disk", "killed"]
    """`error`: an exception or an exit status that isn't 0. `killed`: by a signal, as for too much processor time."""
    seconds: float
    isolation: str
    """Which means of the system isolated it."""


class _Output:
    """The first and the last bytes of a stream."""

    def __init__(self, size: int) -> None:
        self._half = max(size // 2, 1)
        self._head, self._tail, self._num_bytes = b"", b"", 0

    def add(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        taken = self._half - len(self._head)
        self._head += chunk[:taken]
        self._tail = (self._tail + chunk[taken:])[-self._half :] if len(chunk) > taken else self._tail

    @property
    def text(self) -> str:
        left_out = self._num_bytes - len(self._head) - len(self._tail)
        middle = f"\n… {left_out:,} bytes left out …\n".encode() if left_out else b""
        return (self._head + middle + self._tail).decode(errors="replace")


async def run_python(code: str, limits: Limits | None = None) -> PythonResult:
    """Runs a program in a fresh process of the sandbox, which sees the standard library and an empty folder. It ends with the
    call, also if that is cancelled.

    Raises:
        NotAvailableError: this system can't isolate a process; the message says what it lacks.
    """
    limits = limits or Limits()
    if not sys.platform.startswith("linux"):
        raise NotAvailableError(f"Python code of a model needs Linux (Landlock and seccomp), and this is {sys.platform}")
    scratch = tempfile.mkdtemp(prefix="turnwise-python-")
    try:
        Path(scratch, "main.py").write_text(code, encoding="utf-8", errors="replace")
        return await _run(scratch, limits)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


async def _run(scratch: str, limits: Limits) -> PythonResult:
    given = {
        "memory": limits.memory_mb * MEBIBYTE,
        "file": limits.disk_mb * MEBIBYTE // 4,
        "cpu_s": int(limits.timeout_s) + 2,
        "threads": limits.threads,
        "parent": os.getpid(),
    }
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-B", "-u", "-X", "utf8", str(JAIL), json.dumps(given)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=scratch,
        env={"PATH": "/usr/bin:/bin", "HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    assert process.stdout is not None
    output = _Output(limits.max_output)
    try:
        # Until this line the process is our own code, which a busy machine may hold up.
        isolation = (await process.stdout.readline()).decode(errors="replace").strip()
        if isolation.startswith("refused: ") or not isolation:
            reason = isolation.removeprefix("refused: ") or f"its launcher ended: {await process.wait()}"
            raise NotAvailableError(f"this system can't isolate Python code of a model: {reason}")
        log.debug("Python code runs isolated by %s", isolation)
        ending = asyncio.gather(_read(process.stdout, output), process.wait())
        try:
            ended = await _watched(ending, scratch, limits)
        finally:
            ending.cancel()
            await asyncio.wait([ending])
    finally:
        # Process.kill would ask for the exit status first, and take it from the event loop.
        with suppress(ProcessLookupError):
            if process.returncode is None:
                os.kill(process.pid, signal.SIGKILL)
        while await process.stdout.read(1 << 20):
            continue  # while there is unread output, `wait` doesn't end
        await process.wait()
    status, text = process.returncode, output.text
    outcome: Literal["ok", "error", "timeout", "disk", "killed"]
    if ended == "timeout":
        outcome, text = ended, f"{text}\nThe code ran for longer than {limits.timeout_s:g} s and was ended."
    elif ended == "disk":
        outcome, text = ended, f"{text}\nThe code wrote more than {limits.disk_mb} MiB of files and was ended."
    elif status is not None and status < 0:
        outcome, text = "killed", f"{text}\nThe code was ended by signal {-status}."
    else:
        outcome = "error" if status else "ok"
    return PythonResult(text, outcome, time.monotonic() - started, isolation)


async def _read(stream: asyncio.StreamReader, output: _Output) -> None:
    while chunk := await stream.read(1 << 16):
        output.add(chunk)


async def _watched(ending: asyncio.Future[Any], scratch: str, limits: Limits) -> Literal["", "timeout", "disk"]:
    """Waits for the end of process and output, and says which limit came first."""
    deadline = time.monotonic() + limits.timeout_s
    while True:
        done, _ = await asyncio.wait([ending], timeout=min(LOOK_S, max(deadline - time.monotonic(), 0)))
        sizes = [entry.stat(follow_symlinks=False).st_blocks * 512 + 4096 for entry in os.scandir(scratch)]
        if sum(sizes) > limits.disk_mb * MEBIBYTE:
            return "disk"
        if done:
            return ""
        if time.monotonic() >= deadline:
            return "timeout"
