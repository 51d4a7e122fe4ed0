"""Episodes that a command plays, each as a process group of its own."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.agents.seat import Outcome, Seat, outcome_of_line
from turnwise.errors import EnvironmentFault

_MAX_KEPT = 1_000_000
"""Maximum bytes that are kept of the end of what a command writes."""
_MAX_SHOWN = 2000
_AFTER_S = 1.0
"""Maximum seconds that what a command has started may keep its output open after its end."""


@dataclass(frozen=True)
class PlayedCommand:
    """Runs `command` in an empty folder, with the task as JSON on its stdin and the session in its
    environment. Exit 0 and the last line of its stdout are the outcome. Whatever it started ends with the
    episode."""

    command: Sequence[str]
    label: str
    environment: Mapping[str, str]
    grace_s: float
    places: asyncio.Semaphore
    """Limits the number of commands that run at once."""

    async def play(self, seat: Seat, workdir: Path) -> Outcome:
        async with self.places:
            process = await self._started(seat, workdir)
            kept = [_Tail(), _Tail()]
            streams = (process.stdout, process.stderr)
            reading = [
                asyncio.ensure_future(tail.read(stream))
                for tail, stream in zip(kept, streams, strict=True)
                if stream is not None
            ]
            try:
                await _give(process, json.dumps(seat.task).encode())
                await process.wait()
                await asyncio.wait(reading, timeout=_AFTER_S)
            except asyncio.CancelledError:
                await self._end(process)
                raise
            finally:
                _kill(process.pid, signal.SIGKILL)
                for task in reading:
                    task.cancel()
                await process.wait()
        output, errors = (tail.text() for tail in kept)
        if process.returncode:
            raise EnvironmentFault(f"{self.label} {_ending(process.returncode)}: {errors[-_MAX_SHOWN:]}")
        lines = output.strip().splitlines()
        return outcome_of_line(lines[-1].strip() if lines else "", self.label)

    async def _started(self, seat: Seat, workdir: Path) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=workdir,
                env=self._variables(seat, workdir),
                start_new_session=True,
            )
        except OSError as fault:
            raise EnvironmentFault(f"{self.label} can't be started: {fault}") from fault

    def _variables(self, seat: Seat, workdir: Path) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(workdir),
            "OPENAI_BASE_URL": seat.base_url,
            "OPENAI_API_KEY": seat.key,
            "OPENAI_MODEL": seat.model,
            # Its clients append /v1/messages.
            "ANTHROPIC_BASE_URL": seat.url,
            "ANTHROPIC_API_KEY": seat.key,
            "ANTHROPIC_MODEL": seat.model,
            **self.environment,
        }

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Asks the group to end, and waits a moment for it."""
        _kill(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(self.grace_s):
                await process.wait()
        except TimeoutError:
            return


class _Tail:
    """The end of what a stream brings."""

    def __init__(self) -> None:
        self._kept = bytearray()

    async def read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(2**16):
            self._kept += chunk
            del self._kept[:-_MAX_KEPT]

    def text(self) -> str:
        return self._kept.decode(errors="replace")


async def _give(process: asyncio.subprocess.Process, task: bytes) -> None:
    """Writes the task to stdin. A command needn't read it."""
    stdin = process.stdin
    if stdin is None:
        return
    try:
        stdin.write(task + b"\n")
        await stdin.drain()
        stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        return


def _kill(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by signal {-returncode}"
    return f"ended with status {returncode}"
