"""A worker's position among the ranks of its role."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from turnwise.errors import ConfigError
from turnwise.runtime.stopwatch import Stopwatch

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT")


def launched() -> tuple[int, int]:
    """`(rank, size)`: the number of this process among those that a launcher started, and how many there are;
    `(0, 1)` unless RANK and WORLD_SIZE are set. Raises ConfigError if a launcher's variables hold impossible
    numbers, or if MASTER_ADDR or MASTER_PORT is missing and there are several processes."""
    rank, size, _ = _launch()
    return rank, size


def launched_nodes() -> int:
    """On how many machines the launcher's processes are, equally many on each. Raises ConfigError as
    `launched`, or if they can't be equally many."""
    _, size, here = _launch()
    if size % here:
        raise ConfigError(
            f"a launcher started {size} processes, {here} of them on this machine; start equally many on "
            "each machine (--nproc_per_node of torchrun, --num_processes of accelerate as a multiple of "
            "--num_machines)"
        )
    return size // here


def _launch() -> tuple[int, int, int]:
    """`(rank, size, here)`: `here` is the number of the launcher's processes on this machine."""
    variables = {name: os.environ[name] for name in _NUMBERS if name in os.environ}
    if not {"RANK", "WORLD_SIZE"} <= variables.keys():
        return 0, 1, 1
    rank = _number(variables["RANK"])
    size = _number(variables["WORLD_SIZE"])
    here = _number(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"]))
    if not (0 <= rank < size and 1 <= here <= size):
        assignments = " and ".join(f"{name}={text}" for name, text in variables.items())
        raise ConfigError(
            f"the environment has {assignments}, which no launcher sets (RANK counts from 0 up to "
            f"WORLD_SIZE - 1, LOCAL_WORLD_SIZE from 1); unset {', '.join(variables)} to train without one"
        )
    missing = [name for name in _MEETING_PLACE if not os.environ.get(name)]
    if size > 1 and missing:
        raise ConfigError(
            f"the environment has RANK and WORLD_SIZE but not {' and '.join(missing)}, where the processes "
            "meet; start them with torchrun or accelerate launch, which set all four, or unset RANK and "
            "WORLD_SIZE to train without a launcher"
        )
    return rank, size, here


def _number(text: str) -> int:
    """The number that a variable holds; -1, which is never valid, if it holds something else."""
    if not text.isdecimal():
        return -1
    return int(text)


class Coordinates(NamedTuple):
    """The index of a rank along each axis of a layout."""

    dp: int
    tp: int
    pp: int
    cp: int


class Layout(NamedTuple):
    """How the devices of a role divide its model and its samples: sizes of data, tensor, pipeline and context
    parallelism. The ranks of one replica follow each other, those of one tensor-parallel group most closely.

    >>> layout = Layout(dp=2, tp=2)
    >>> [layout.position(rank)[:2] for rank in range(layout.size)]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> [layout.answers(rank) for rank in range(layout.size)]
    [True, False, True, False]
    """

    dp: int = 1
    """Number of replicas: copies of the model, each of which gets a share of the samples."""
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.dp * self.replica_size

    @property
    def replica_size(self) -> int:
        """Number of devices of one copy of the model."""
        return self.tp * self.pp * self.cp

    def position(self, rank: int) -> Coordinates:
        """Where a rank is along each axis."""
        remaining, tp = divmod(rank, self.tp)
        remaining, cp = divmod(remaining, self.cp)
        dp, pp = divmod(remaining, self.pp)
        return Coordinates(dp, tp, pp, cp)

    def answers(self, rank: int) -> bool:
        """Whether a rank speaks for its replica: the first one of the last pipeline stage, which has the
        results."""
        position = self.position(rank)
        return position.pp == self.pp - 1 and position.tp == 0 and position.cp == 0

    @property
    def speaker(self) -> int:
        """The rank that speaks for all: the one that answers for the first replica."""
        return next(rank for rank in range(self.size) if self.answers(rank))


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of a role, in the process that hosts it. By default the only rank, on the CPU."""

    role: str = ""
    rank: int = 0
    world_size: int = 1
    """Number of the role's ranks."""
    layout: Layout = field(default_factory=Layout)
    """How the role's devices divide its model and its samples."""
    node: str = ""
    """Name of the rank's node; empty for this machine."""
    device: str = "cpu"
    """The rank's device, as torch names it."""
    devices: tuple[str, ...] = ()
    """All devices of an inference server whose model is split over several, `device` first; empty for one on
    `device` alone."""
    peers: tuple[int, ...] = (0,)
    """For each rank of the role: the number of its process in torch's default process group."""
    neighbours: Mapping[str, Any] = field(default_factory=dict)
    """Workers of other roles in this process, by role: a server here can read its trainer's tensors without a
    copy."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def all_devices(self) -> tuple[str, ...]:
        return self.devices or (self.device,)

    @property
    def position(self) -> Coordinates:
        """Where the rank is along each axis of the layout."""
        return self.layout.position(self.rank)

    @property
    def answers(self) -> bool:
        """Whether this rank speaks for all: it reports what is the same on every rank, and writes
        checkpoints."""
        return self.rank == self.layout.speaker
