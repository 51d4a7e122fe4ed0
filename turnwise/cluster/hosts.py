"""Who starts the processes of a run."""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from turnwise.cluster.process import WorkerProcess
from turnwise.runtime.machine import num_cores
from turnwise.runtime.placement import Placement
from turnwise.runtime.stopwatch import Stopwatch


class Hosts(Protocol):
    """Starts processes that host workers, on the nodes of a run's devices."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment that the processes take over; empty if they have their own."""

    def start(self, module: str, names: Sequence[str], devices: Sequence[int]) -> list[WorkerProcess]:
        """Starts a process for each name, on the node of its device. It runs a module of `cluster`, until it
        is ended. Names name the processes in errors."""

    @property
    def num_cores(self) -> int:
        """Number of cores of all nodes of the run."""

    def start_beside(self, module: str, name: str) -> WorkerProcess:
        """Starts a process without a device, on the node that has the most cores for each such process."""

    def before_close(self, end: Callable[[], object]) -> None:
        """Has `end` called before what is still there is ended."""

    def device_name(self, device: int) -> str:
        """Torch's name for a device, in the processes of its node."""

    def node_name(self, device: int) -> str:
        """The name of a device's node; empty for this machine."""

    def close(self) -> None:
        """Ends what is still there. Calling it again is harmless."""


class ForkedHosts:
    """Forks processes of this machine."""

    def __init__(self, placement: Placement, stopwatch: Stopwatch) -> None:
        self._machine = placement.machine
        self._stopwatch = stopwatch

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self, module: str, names: Sequence[str], devices: Sequence[int]) -> list[WorkerProcess]:
        return [WorkerProcess.fork(name, module, self._stopwatch) for name in names]

    @property
    def num_cores(self) -> int:
        return num_cores()

    def start_beside(self, module: str, name: str) -> WorkerProcess:
        return WorkerProcess.fork(name, module, self._stopwatch)

    def before_close(self, end: Callable[[], object]) -> None:
        """Does nothing: whoever started a process ends it."""

    def device_name(self, device: int) -> str:
        return self._machine.device_name(device)

    def node_name(self, device: int) -> str:
        return self._machine.node_of(device).name

    def close(self) -> None:
        """Does nothing: whoever started a process ends it."""
