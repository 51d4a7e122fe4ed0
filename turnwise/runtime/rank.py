"""A worker's position among the ranks of its role."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import ConfigError
from turnwise.runtime.stopwatch import Stopwatch


def launched() -> tuple[int, int]:
    """`(rank, size)`: the number of this process among those that a launcher started, and how many there are; `(0, 1)` without
    a launcher. Raises ConfigError if they are on several machines, or if RANK and WORLD_SIZE contradict each other."""
    told = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    if None in told:
        return 0, 1
    rank, size = (int(text) if text and text.isdecimal() else -1 for text in told)
    if not 0 <= rank < size:
        raise ConfigError(
            f"the environment has RANK={told[0]} and WORLD_SIZE={told[1]}, which no launcher sets (RANK counts from 0 up to "
            "WORLD_SIZE - 1); unset both to train without one"
        )
    if (here := int(os.environ.get("LOCAL_WORLD_SIZE", size))) != size:
        raise ConfigError(
            f"a launcher started {size} processes, {here} of them on this machine, and this version trains on one machine; "
            "start all of them here (--nnodes 1 of torchrun, --num_machines 1 --machine_rank 0 of accelerate)"
        )
    return rank, size


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of a role, in the process that hosts it. By default the only rank, on the CPU."""

    role: str = ""
    rank: int = 0
    world_size: int = 1
    """Number of the role's ranks."""
    device: str = "cpu"
    """The rank's device, as torch names it."""
    layout: Mapping[str, int] = field(default_factory=lambda: {"dp": 1})
    """Sizes of the parallel dimensions; their product is `world_size`."""
    peers: tuple[int, ...] = (0,)
    """For each rank of the role, in order: the rank in torch's default process group of the process that hosts it."""
    neighbours: Mapping[str, Any] = field(default_factory=dict)
    """Workers of other roles in this process, by role: a server here can read its trainer's tensors without a copy."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def answers(self) -> bool:
        """Whether this rank speaks for all: it reports what is the same on every rank, and writes checkpoints."""
        return self.rank == 0
