"""The form of a transfer between nodes: a group of the trainer's first rank and one receiver a node, which
gets the weights in buckets and keeps them in shared memory of its node."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from turnwise.errors import WorkerError
from turnwise.runtime.torch_group import Meeting
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.shared_memory import SharedMemory, SharedWeights
from turnwise.transfer.weight_group import WeightGroup


@dataclass(frozen=True)
class NodeWeights:
    """The weights in shared memory of several nodes: one copy for all processes of a node."""

    manifest: WeightManifest
    by_node: Mapping[str, SharedWeights]

    def on(self, node: str) -> SharedWeights:
        """The copy of a node. Raises WorkerError if the node has none."""
        if node not in self.by_node:
            nodes = ", ".join(map(repr, self.by_node))
            raise WorkerError(f"the weights were sent to the nodes {nodes}, and not to {node!r}")
        return self.by_node[node]

    def __iter__(self) -> NoReturn:
        raise WorkerError("weights of several nodes are read from the copy of one; `on` gives it")


@dataclass(frozen=True)
class GroupWeights:
    """Weights that the first rank of a group sends while they are received, to an engine whose own processes
    are the group's members."""

    manifest: WeightManifest
    meeting: Meeting
    first_ranks: Mapping[int, int]
    """Number of an inference replica → the rank of its first process in the group."""
    num_processes: int
    """Number of members of each replica."""
    size: int
    """Number of members, with the sender."""
    timeout_s: float
    device_type: str = "cpu"
    """The kind of devices between which they travel: `cpu` (by gloo) or `cuda` (by NCCL)."""
    name: str = ""
    """See `WeightGroup`."""

    def on(self, node: str) -> "GroupWeights":
        return self

    async def give_up(self, reason: str) -> None:
        """See `ReceivedTogether`. The sender ends its wait, too."""
        await asyncio.to_thread(WeightGroup.give_up, self.meeting, reason)

    def __iter__(self) -> NoReturn:
        raise WorkerError("weights of a group are received by its members, and can't be read elsewhere")


class NodeReceiver:
    """Receives weights for all processes of its node."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None
        self._memory: SharedMemory | None = None

    def join_group(
        self,
        meeting: Meeting,
        rank: int,
        size: int,
        timeout_s: float,
    ) -> None:
        """Joins the group of the sender; leaves the one before."""
        self._group = WeightGroup.find(meeting, timeout_s)
        self._group.join(rank, size)

    def collect(self, manifest: WeightManifest) -> SharedWeights:
        """Receives weights of this manifest, and returns where they are."""
        if self._group is None:
            raise WorkerError("this process has joined no group that sends weights")
        if self._memory is None or self._memory.weights.manifest != manifest:
            self._memory = SharedMemory(manifest)
        memory = self._memory
        # What has been on its way when a transfer fails may come later: nothing else is written there.
        self._memory = None
        self._group.receive(memory.buckets)
        self._memory = memory
        return memory.weights
