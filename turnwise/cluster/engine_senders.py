"""The senders of weights on all ranks of a role, as one, to engines whose own processes receive them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from turnwise.cluster.weight_senders import SendingRanks
from turnwise.errors import WorkerError
from turnwise.protocols import Pending, WeightSource
from turnwise.runtime.torch_group import Meeting
from turnwise.transfer.group import GroupWeights
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.staging import DeviceCopies

logger = logging.getLogger(__name__)


class NumberedReplica(Protocol):
    """A server whose engine receives weights in its own processes."""

    replica: int


class NumberedReplicas(Protocol):
    @property
    def servers(self) -> Sequence[NumberedReplica]:
        """The servers that are alive."""


@dataclass
class SendingEngines:
    """A `protocols.SendsWeights` to engines whose own processes receive what the first rank sends, without a
    copy between them. Each engine has `num_processes`. Each version has a group of its own, whose members
    reach the first rank at the address `host`, or over the network `interface` of each node; a wait inside it
    may take `timeout_s` seconds. `device_type` is that of the devices between which weights travel."""

    ranks: SendingRanks
    replicas: NumberedReplicas
    host: str
    num_processes: int
    timeout_s: float
    interface: str = ""
    device_type: str = "cpu"
    _sending: Pending | None = None

    def manifest(self) -> Pending:
        return self.ranks.manifest()

    async def publish(self) -> WeightSource:
        await self._end_sending()
        manifest: WeightManifest = await self.ranks.workers.call(
            "stage", self.ranks.dtype, self.device_type, route=self.ranks.route
        )
        return await self._begin(manifest)

    async def publish_again(self, server: Any = None, is_lost: bool = False) -> WeightSource:
        """The weights of the last `publish`, for `server` alone if it is given."""
        await self._end_sending()
        manifest: WeightManifest = await self.ranks.first.call("staged")
        return await self._begin(manifest, server)

    async def _begin(self, manifest: WeightManifest, server: NumberedReplica | None = None) -> GroupWeights:
        """Begins to send weights to a server, or to all that are alive, who have yet to receive them."""
        first = self.ranks.first
        # SGLang refuses a name that it has had, also from a run that ended in the middle.
        name = f"turnwise-{uuid4().hex[:12]}"
        meeting: Meeting = await first.call(
            "open_group", self.host, self.timeout_s, self.interface, self.device_type, name
        )
        # From here until they receive, nothing runs in which one could be taken out.
        servers = self.replicas.servers if server is None else [server]
        numbers = sorted(server.replica for server in servers)
        first_ranks = {number: 1 + index * self.num_processes for index, number in enumerate(numbers)}
        size = 1 + len(numbers) * self.num_processes
        self._sending = first.call("send_to_group", size)
        return GroupWeights(
            manifest,
            meeting,
            first_ranks,
            self.num_processes,
            size,
            self.timeout_s,
            self.device_type,
            name,
        )

    async def _end_sending(self) -> None:
        """Waits until the version before is sent. If it wasn't, its receivers have failed and said why."""
        sending = self._sending
        self._sending = None
        if sending is None:
            return
        try:
            await sending
        except WorkerError as error:
            logger.warning("%s", error)


@dataclass
class CopyingRanks:
    """A `protocols.SendsWeights` to engines on the trainer's devices: each of the ranks in `nodes`, which
    gives the node of each, copies the weights on its device, and the engine's process there reads the
    copy."""

    ranks: SendingRanks
    nodes: Mapping[int, str]

    def manifest(self) -> Pending:
        return self.ranks.manifest()

    async def publish(self) -> WeightSource:
        # All ranks gather together.
        await self.ranks.workers.call("copy", self.ranks.dtype, tuple(self.nodes))
        return await self._copies()

    async def publish_again(self, server: Any = None, is_lost: bool = False) -> WeightSource:
        """The weights of the last `publish`. Each copy is handed over once more, since it's read once."""
        return await self._copies()

    async def _copies(self) -> DeviceCopies:
        calls = [self.ranks.workers.at(rank).call("copied") for rank in self.nodes]
        by_node: dict[str, dict[str, WeightSource]] = {}
        for node, call in zip(self.nodes.values(), calls, strict=True):
            device, weights = await call
            by_node.setdefault(node, {})[device] = weights
        return DeviceCopies(weights.manifest, by_node)
