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

_STDOUT = 1
_STDERR = 2
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

    async def play(self, seat: Seat, workdir: Path) -> Outcome:
        transport, process = await self._started(seat, workdir)
        group = transport.get_pid()
        try:
            process.give(json.dumps(seat.task).encode() + b"\n")
            await process.ended.wait()
        except asyncio.CancelledError:
            _kill(group, signal.SIGTERM)
            await _in_time(process.ended, self.grace_s)
            raise
        finally:
            _kill(group, signal.SIGKILL)
            await _in_time(process.is_read, _AFTER_S)
            transport.close()
        status = transport.get_returncode() or 0
        if status:
            raise EnvironmentFault(f"{self.label} {_ending(status)}: {process.text(_STDERR)[-_MAX_SHOWN:]}")
        lines = process.text(_STDOUT).strip().splitlines()
        return outcome_of_line(lines[-1].strip() if lines else "", self.label)

    async def _started(self, seat: Seat, workdir: Path) -> tuple[asyncio.SubprocessTransport, "_Process"]:
        try:
            # Not by `create_subprocess_exec`, whose `wait` waits for everybody who has the pipes open.
            return await asyncio.get_running_loop().subprocess_exec(
                _Process,
                *self.command,
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


class _Process(asyncio.SubprocessProtocol):
    """A command that runs: the end of what it writes, and its own end."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.is_read = asyncio.Event()
        """Set when nothing more can be read."""
        self._kept = {_STDOUT: bytearray(), _STDERR: bytearray()}
        self._open = {*self._kept}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._stdin = transport.get_pipe_transport(0)

    def give(self, content: bytes) -> None:
        """Writes to stdin and closes it. A command needn't read it."""
        if isinstance(self._stdin, asyncio.WriteTransport):
            self._stdin.write(content)
            self._stdin.close()

    def text(self, fd: int) -> str:
        return self._kept[fd].decode(errors="replace")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self._kept[fd]
        kept += data
        del kept[:-_MAX_KEPT]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.is_read.set()

    def process_exited(self) -> None:
        self.ended.set()


async def _in_time(event: asyncio.Event, seconds: float) -> None:
    """Waits for an event, but not for long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
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
