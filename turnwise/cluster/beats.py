"""Signs of life between a run and the nodes of its actors. This module imports neither ray nor torch."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple

logger = logging.getLogger(__name__)

BEAT_S = 5.0
"""Most seconds between two signs of life."""
LOOK_S = 1.0
"""Seconds between two looks for them."""
_LONG_LOOK_S = 2 * BEAT_S
"""A look that comes later than this after the one before says nothing: whoever looks stood still itself."""
_UNAVAILABLE = "ActorUnavailableError"
"""Ray's error about a call that may or may not have been executed, by its name."""

ProcessState = Literal["runs", "stopped", "ended"]


class ProcessKey(NamedTuple):
    """Names a process of a node, even if its number is given to another one later."""

    number: int
    started: str
    """When it started, as the system counts; empty where the system doesn't tell."""

    @classmethod
    def of_this(cls) -> "ProcessKey":
        number = os.getpid()
        return cls(number, _status(number)[1])

    def state(self) -> ProcessState:
        """How the process is, as seen on its node."""
        letter, started = _status(self.number)
        if not letter or started != self.started or letter in "ZX":
            return "ended"
        return "stopped" if letter in "Tt" else "runs"


def _status(number: int) -> tuple[str, str]:
    """The state of a process, as a letter of the system's, and its start. The letter is empty if there is no
    such process."""
    if sys.platform != "linux":
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return "", ""
        return "R", ""
    try:
        text = Path(f"/proc/{number}/stat").read_text(errors="replace")
    except OSError:
        return "", ""
    # The name of the program comes first, in parentheses, and may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


class Heartbeat:
    """One who is asked for a sign of life every `BEAT_S` seconds, or three times in the `node_s` of silence
    that mean an end if these are fewer. `ask` begins a call."""

    def __init__(
        self,
        ask: Callable[[], Future[Any]],
        node_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.silent_s = 0.0
        """Seconds since the latest answer, without those in which nobody looked."""
        self.answer: Any = None
        """The latest answer."""
        self.has_ended = False
        """Whether the one who is asked is known to have ended."""
        self._ask = ask
        self._beat_s = min(BEAT_S, node_s / 3)
        self._clock = clock
        self._pending: Future[Any] | None = None
        self._looked_at = clock()
        self._next = self._looked_at

    def look(self) -> float:
        """Notes an answer, and asks again when it is time. Returns the seconds since the last look; 0 if this
        process stood still meanwhile."""
        looked_at = self._clock()
        elapsed = looked_at - self._looked_at
        if elapsed > _LONG_LOOK_S:
            elapsed = 0.0
        self._looked_at = looked_at
        self.silent_s += elapsed
        if self._pending is not None and self._pending.done():
            self._note(self._pending)
            self._pending = None
        if self._pending is None and looked_at >= self._next:
            self._next = looked_at + self._beat_s
            self._pending = self._ask()
        return elapsed

    def _note(self, call: Future[Any]) -> None:
        error = call.exception()
        if error is None:
            self.answer = call.result()
            self.silent_s = 0.0
        else:
            self.has_ended = type(error).__name__ != _UNAVAILABLE


class NodeMonitor:
    """Watches nodes for the process of the run. Calls `lose` with a node's key and the reason, once it has
    ended or is silent for `node_s` seconds."""

    def __init__(
        self,
        heartbeats: Mapping[Any, Heartbeat],
        node_s: float,
        lose: Callable[[Any, str], object],
    ) -> None:
        self._heartbeats = dict(heartbeats)
        self._node_s = node_s
        self._lose = lose

    def look(self) -> None:
        for key, heartbeat in list(self._heartbeats.items()):
            heartbeat.look()
            reason = ""
            if heartbeat.has_ended:
                reason = "is gone, or its agent has ended"
            elif heartbeat.silent_s >= self._node_s:
                reason = (
                    f"has been silent for {heartbeat.silent_s:.0f} s (deadlines.node_s: {self._node_s:g})"
                )
            if reason:
                del self._heartbeats[key]
                self._lose(key, reason)


class DriverWatch:
    """Watches the process of the run for the actors of a node. Calls `end` with the reason once it is dead,
    or its node is silent for `node_s` seconds, or it stands still for `stopped_s` (None = no limit). Calls
    `warn` when it begins to stand still."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        node_s: float,
        stopped_s: float | None,
        end: Callable[[str], object],
        warn: Callable[[str], object],
    ) -> None:
        self._heartbeat = heartbeat
        self._node_s = node_s
        self._stopped_s = stopped_s
        self._end = end
        self._warn = warn
        self._standing_s: float | None = None

    def look(self) -> None:
        heartbeat = self._heartbeat
        elapsed = heartbeat.look()
        if heartbeat.has_ended or heartbeat.answer == "ended":
            self._end("the run's process has ended")
        elif heartbeat.silent_s >= self._node_s:
            self._end(f"the node of the run's process has been silent for {heartbeat.silent_s:.0f} s")
        elif heartbeat.answer == "stopped":
            self._note_stop(elapsed)
        else:
            self._standing_s = None

    def _note_stop(self, elapsed: float) -> None:
        if self._standing_s is None:
            self._standing_s = 0.0
            limit = "" if self._stopped_s is None else f" for at most {self._stopped_s:g} s"
            self._warn(f"the run's process stands still (a debugger, Ctrl-Z); its actors wait{limit}")
        self._standing_s += elapsed
        if self._stopped_s is not None and self._standing_s >= self._stopped_s:
            self._end(f"the run's process has stood still for {self._standing_s:.0f} s")


class Looking:
    """Calls `look` every `LOOK_S` seconds in a thread of its own, until `end`. An error of a look is logged,
    unless the one before failed too: without further looks, nobody would learn of a silence."""

    def __init__(self, name: str, look: Callable[[], object]) -> None:
        self._look = look
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the looks, and waits for one that has begun."""
        self._is_over.set()
        self._thread.join(BEAT_S)

    def _run(self) -> None:
        has_failed = False
        while not self._is_over.wait(LOOK_S):
            try:
                self._look()
                has_failed = False
            except Exception:  # boundary: calls of other libraries, such as those of Ray that ask for a sign
                if not has_failed:
                    logger.exception("%s: a look failed, and the next ones follow", self._thread.name)
                has_failed = True
