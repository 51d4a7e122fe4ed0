"""The form of a transfer between nodes: a group of the trainer's first rank and one receiver a node, which
gets the weights in buckets and keeps them in shared memory of its node."""

import asyncio
import socket
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from turnwise.errors import LostWeightsError, WorkerError
from turnwise.runtime.machine import address_of
from turnwise.runtime.torch_group import Meeting
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.shared_memory import SharedMemory, SharedWeights

BUCKET_BYTES = 16_000_000
"""Bytes that travel in one message. Of 4 to 32 MB all are about as fast; tensor by tensor is five times
slower."""
_SETTING = "cluster.interface"
_GIVEN_UP = "given up"  # key of a group's store: why somebody never comes
_CONNECT = timedelta(seconds=30)  # time to connect to a process that is there
_POLL_S = 0.02
_IN_FLIGHT = 2  # buckets on their way at once


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
    size: int
    """Number of members, with the sender."""
    timeout_s: float

    def on(self, node: str) -> "GroupWeights":
        return self

    async def give_up(self, reason: str) -> None:
        """See `ReceivedTogether`. The sender ends its wait, too."""
        await asyncio.to_thread(WeightGroup.give_up, self.meeting, reason)

    def __iter__(self) -> NoReturn:
        raise WorkerError("weights of a group are received by its members, and can't be read elsewhere")


class WeightGroup:
    """A gloo group of its own, beside torch's default group. The sender opens it and is its rank 0; the
    others reach it at `meeting`. Errors of gloo are raised as WorkerError."""

    def __init__(
        self,
        meeting: Meeting,
        store: dist.TCPStore,
        host: str,
        timeout_s: float,
    ) -> None:
        self.meeting = meeting
        self._store = store
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None

    @classmethod
    def open(cls, host: str, timeout_s: float, interface: str = "") -> "WeightGroup":
        """A group whose members meet at a free port of this node. They reach the node at the address of its
        network `interface`, or at `host` if that is empty. Raises ConfigError if there is no such
        interface."""
        if interface:
            host = address_of(interface, _SETTING)
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return cls(Meeting(host, store.port, interface), store, host, timeout_s)

    @classmethod
    def find(cls, meeting: Meeting, timeout_s: float) -> "WeightGroup":
        """The group that another process has opened. Raises WorkerError if it can't be reached, and
        ConfigError if this node lacks the group's network interface."""
        timeout = timedelta(seconds=timeout_s)
        own_host = address_of(meeting.interface, _SETTING) if meeting.interface else ""
        try:
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
            own_host = own_host or _own_address(meeting)
        except (RuntimeError, OSError) as error:
            raise WorkerError(
                f"the weights can't be had from {meeting.host}:{meeting.port}: {error}; {_SETTING} "
                "names the network by which the nodes reach each other"
            ) from error
        return cls(meeting, store, own_host, timeout_s)

    @classmethod
    def give_up(cls, meeting: Meeting, reason: str) -> None:
        """Ends the waits of those that have come to a meeting, in whatever process: somebody else never
        comes."""
        with suppress(OSError, RuntimeError):  # nobody waits there any more
            # The store's own attempts to connect last for minutes.
            socket.create_connection((meeting.host, meeting.port), _CONNECT.total_seconds()).close()
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=_CONNECT)
            store.set(_GIVEN_UP, reason)

    def join(self, rank: int, size: int) -> None:
        """Waits until all `size` members have come. Raises LostWeightsError if somebody gives that up,
        WorkerError if it takes too long."""
        self._gather(rank, size)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # All have come. One that ends before it is connected would be awaited as long.
        options._timeout = min(self._timeout, _CONNECT)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        try:
            self._group = dist.ProcessGroupGloo(self._store, rank, size, options)
        except RuntimeError as error:
            raise WorkerError(
                f"member {rank} of {size} could not join those who send and receive weights: {error}"
            ) from error

    def _gather(self, rank: int, size: int) -> None:
        """Waits until all members have come. gloo's own wait couldn't be ended."""
        members = [f"member {number}" for number in range(size)]
        end = time.monotonic() + self._timeout.total_seconds()
        try:
            self._store.set(members[rank], "")
            while not self._store.check(members):
                if self._store.check([_GIVEN_UP]):
                    reason = self._store.get(_GIVEN_UP).decode()
                    raise LostWeightsError(f"the weights aren't sent to those that wait for them: {reason}")
                if time.monotonic() > end:
                    missing = [member for member in members if not self._store.check([member])]
                    raise WorkerError(
                        f"member {rank} of {size} of those who send and receive weights waited "
                        f"{self._timeout.total_seconds():g} s for {', '.join(missing)}"
                    )
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise WorkerError(f"the sender of the weights has ended: {error}") from error

    def send(self, memory: SharedMemory) -> None:
        """Sends what the memory holds to all members."""
        self._broadcast(memory)

    def receive(self, memory: SharedMemory) -> None:
        """Writes what rank 0 sends into the memory."""
        self._broadcast(memory)

    def _broadcast(self, memory: SharedMemory) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        pending: list[Any] = []
        try:
            for bucket in memory.buckets(BUCKET_BYTES):
                if len(pending) == _IN_FLIGHT:
                    pending.pop(0).wait()
                pending.append(self._group.broadcast([bucket], options))
            while pending:
                pending.pop(0).wait()
        except RuntimeError as error:
            # Closes the connections: members may wait for this one, and not for the one that has ended. No
            # variable may hold a broadcast, which the error's traceback would keep.
            pending.clear()
            self._group = None
            raise WorkerError(f"the weights could not be sent to all nodes: {error}") from error


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
        self._group.receive(self._memory)
        return self._memory.weights


def _own_address(meeting: Meeting) -> str:
    """This node's address, as the sender of weights reaches it: that of a connection to the sender."""
    with closing(socket.create_connection((meeting.host, meeting.port))) as connection:
        address: str = connection.getsockname()[0]
    return address
