"""Episodes that a user's function plays, each in a thread of its own with an event loop of its own."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.agents.seat import Outcome, Seat, read_outcome
from turnwise.errors import DeadlineError
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.threads import DaemonThread

logger = logging.getLogger(__name__)

OFFERED = ("model", "env", "workdir")
"""What a function gets if it has a parameter of this name, after base URL, key and task."""
_MAX_STUCK = 16


@dataclass(slots=True)
class StuckThreads:
    """The threads of functions that didn't end with their episodes."""

    _running: list[tuple[DaemonThread, Any]] = field(default_factory=list)

    def add(self, thread: DaemonThread, call: Any, label: str) -> None:
        """Leaves a thread behind."""
        self._running.append((thread, call))
        logger.warning("%s didn't end with its episode: its thread was left behind", label)

    def check(self, label: str) -> None:
        """Raises DeadlineError, with the stacks, if too many threads that were left behind still run."""
        self._running = [(thread, call) for thread, call in self._running if not call.done()]
        if len(self._running) <= _MAX_STUCK:
            return
        stacks = "\n".join(dict.fromkeys(thread.stack() for thread, _ in self._running))
        raise DeadlineError(
            f"{label}: {len(self._running)} of its threads go on after their episodes ended, and at most "
            f"{_MAX_STUCK} may; let it end when its client gets an error, or raise agent.grace_s\n{stacks}"
        )


@dataclass(frozen=True)
class PlayedFunction:
    """Calls `function(base_url, api_key, task)`, a function or coroutine function, with those of `OFFERED`
    that it has parameters for. It runs in a thread, so that a client that blocks holds up nobody."""

    function: Callable[..., Any]
    label: str
    offered: Sequence[str]
    grace_s: float
    stuck: StuckThreads

    async def play(self, seat: Seat, workdir: Path) -> Outcome:
        self.stuck.check(self.label)
        arguments = {"model": seat.model, "env": seat.env, "workdir": str(workdir)}
        named = {name: arguments[name] for name in self.offered}
        thread = DaemonThread(f"play {seat.episode}")
        # A function may append to the prompt, which all siblings share.
        task = deepcopy(dict(seat.task))
        call = thread.start(self._call, seat.base_url, seat.key, task, named)
        thread.end()
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        call.add_done_callback(lambda _: _tell(loop, ended))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            await self._end(thread, call, ended)
            raise
        fault = call.exception()
        if fault is not None:
            # What ends the interpreter, or a loop, ends this episode alone.
            with Foreign(self.label):
                raise fault
        return read_outcome(call.result(), self.label)

    def _call(self, base_url: str, key: str, task: dict[str, Any], named: dict[str, Any]) -> Any:
        result = self.function(base_url, key, task, **named)
        if inspect.iscoroutine(result):
            return asyncio.run(result)
        return result

    async def _end(self, thread: DaemonThread, call: Any, ended: asyncio.Event) -> None:
        """Waits a moment for the function to end, since its client gets errors now; else interrupts it."""
        try:
            async with asyncio.timeout(self.grace_s):
                await ended.wait()
            return
        except TimeoutError:
            thread.interrupt()
        try:
            async with asyncio.timeout(min(self.grace_s, 1.0)):
                await ended.wait()
        except TimeoutError:
            self.stuck.add(thread, call, self.label)


def _tell(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    # The thread of an episode that is over may outlive the loop.
    if not loop.is_closed():
        loop.call_soon_threadsafe(ended.set)
