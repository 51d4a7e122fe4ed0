"""A small actor on each node of a run: it answers for the node's processes while they can't."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.cluster.beats import DriverWatch, Heartbeat, Looking, ProcessKey, ProcessState
from turnwise.cluster.node_facts import NodeFacts, node_facts

_STACK_S = 5.0  # seconds to wait for the stacks of a process
_QUIET_S = 0.3  # seconds without a further line after which stacks are complete
_POLL_S = 0.05
_TAIL_BYTES = 16_384


class WatchSettings(NamedTuple):
    """How an agent watches the process of the run."""

    driver: ProcessKey
    node_s: float
    """Seconds of silence after which a node counts as lost."""
    stopped_s: float | None
    """Seconds that the run's process may stand still."""


class NodeAgent:
    """Answers for one node. It ends the node's actors when the process of the run has ended. `home` is the
    agent on that process's node; None if it is this one."""

    def __init__(self, settings: WatchSettings, home: Any = None) -> None:
        self._driver = settings.driver
        self._hosts: list[ProcessKey] = []
        heartbeat = Heartbeat(self._seen_here, settings.node_s)
        if home is not None:
            heartbeat = Heartbeat(lambda: home.driver_state.remote().future(), settings.node_s)
        watch = DriverWatch(heartbeat, settings.node_s, settings.stopped_s, self._end, _say)
        Looking("driver watch", watch.look)

    def beat(self) -> None:
        """Shows that this node lives."""

    def driver_state(self) -> ProcessState:
        """How the process of the run is, which is on this node."""
        return self._driver.state()

    def _seen_here(self) -> Future[Any]:
        seen: Future[Any] = Future()
        seen.set_result(self._driver.state())
        return seen

    def add_host(self, process: ProcessKey) -> None:
        """Notes a process of this node that ends with the run."""
        self._hosts.append(process)

    def _end(self, reason: str) -> None:
        _say(f"{reason}: this node's processes of the run end")
        for process in self._hosts:
            if process.state() != "ended":
                with suppress(ProcessLookupError):
                    os.kill(process.number, signal.SIGKILL)
        os._exit(1)

    def facts(self) -> NodeFacts:
        return node_facts()

    def missing(self, paths: Mapping[str, str]) -> list[str]:
        """The keys of the paths that don't exist on this node."""
        return [key for key, path in paths.items() if not os.path.exists(path)]

    def stacks(self, process_id: int, path: str) -> str:
        """The stacks of a process of this node, which writes them into the file `path` on SIGUSR1."""
        try:
            start = os.path.getsize(path)
            os.kill(process_id, signal.SIGUSR1)
        except OSError as error:
            return f"no stacks: {error}"
        end = time.monotonic() + _STACK_S
        size = start
        changed = time.monotonic()
        while time.monotonic() < end and (size == start or time.monotonic() < changed + _QUIET_S):
            time.sleep(_POLL_S)
            latest = os.path.getsize(path)
            if latest != size:
                size = latest
                changed = time.monotonic()
        with open(path, "rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace") or "it doesn't say"

    def tail(self, path: str, num_lines: int) -> str:
        """The last lines of a file of this node; empty if there is no such file."""
        if not Path(path).is_file():
            return ""
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
