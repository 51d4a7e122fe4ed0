"""The senders of weights on all ranks of a role, as one: to servers of one node, or of several."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from turnwise.errors import LostWeightsError
from turnwise.protocols import Cluster, Pending, RankCalls, Route, WeightSource, Workers
from turnwise.runtime.torch_group import Meeting
from turnwise.transfer.group import NodeWeights
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.sender import make_sender
from turnwise.transfer.shared_memory import SharedWeights
from turnwise.transfer.weight_group import WeightGroup

SENDER = "weight_sender"
"""The role of the workers that send weights."""


@dataclass(frozen=True)
class SendingRanks:
    """A `protocols.SendsWeights` to servers of the ranks' node. It calls the senders of all ranks if the
    model is sharded, else that of the first rank. What is sent is narrowed to `dtype` (torch's name; empty:
    the trainer's)."""

    workers: Workers
    is_sharded: bool = False
    dtype: str = ""
    is_shared: bool = True
    """Whether servers in other processes can read what is sent."""
    speaker: int = 0
    """The rank that keeps what all gather, see `Layout.speaker`."""

    def manifest(self) -> Pending:
        return self.workers.call("manifest", route=self.route)

    def publish(self) -> Pending:
        return self.workers.call("publish", self.dtype, route=self.route)

    def publish_again(self, server: Any = None, is_lost: bool = False) -> Pending:
        return self.first.call("published")

    def trained_weights(self) -> WeightSource:
        """The trainer's weights as they are now, in its own dtype."""
        weights: WeightSource = self.workers.call("publish", route=self.route).result()
        return weights

    @property
    def first(self) -> RankCalls:
        """The rank that has the weights."""
        return self.workers.at(self.speaker)

    @property
    def route(self) -> Route:
        """Who is called for the weights."""
        return "broadcast" if self.is_sharded else "rank0"


class ReceivesForNode(Protocol):
    """A server that can receive weights for all servers of its node, see `transfer.group.NodeReceiver`."""

    node: str

    async def join_group(
        self,
        meeting: Meeting,
        rank: int,
        size: int,
        timeout_s: float,
    ) -> None: ...

    async def collect(self, manifest: WeightManifest) -> SharedWeights: ...


class Replicas(Protocol):
    """The servers of a run, which the server manager keeps."""

    @property
    def servers(self) -> Sequence[ReceivesForNode]:
        """The servers that are alive."""

    def bury(self, server: ReceivesForNode, error: Exception) -> None:
        """Takes out a server that has been found dead."""


@dataclass
class SendingGroup:
    """A `protocols.SendsWeights` to servers of several nodes. The first server of each node receives for all
    of them. `ranks` send from `node`, which the others reach at the address `host`, or over the network
    `interface` of each node. If the process of a receiver ends meanwhile, the weights are sent to the others
    again. Each wait inside the group may take `timeout_s` seconds."""

    ranks: SendingRanks
    replicas: Replicas
    node: str
    host: str
    timeout_s: float
    interface: str = ""

    def __post_init__(self) -> None:
        self._members: list[ReceivesForNode] = []
        self._meeting: Meeting | None = None
        self._sent: NodeWeights | None = None

    def manifest(self) -> Pending:
        return self.ranks.manifest()

    async def publish(self) -> WeightSource:
        self._sent = None
        return await self._spread(await self.ranks.publish(), self._receivers())

    async def publish_again(self, server: Any = None, is_lost: bool = False) -> WeightSource:
        """The weights of the last `publish`, on the nodes of all servers and of `server`. They are sent again
        only if the receiver of a node has changed, or with `is_lost`: a receiver may have ended unnoticed."""
        if is_lost:
            self._members = []
        receivers = self._receivers(server)
        if self._sent is not None and receivers == self._members and not is_lost:
            return self._sent
        return await self._spread(await self.ranks.publish_again(), receivers)

    def _receivers(self, server: ReceivesForNode | None = None) -> list[ReceivesForNode]:
        """The first server of each node but the sender's."""
        by_node: dict[str, ReceivesForNode] = {}
        joining = [] if server is None else [server]
        for candidate in [*self.replicas.servers, *joining]:
            if candidate.node != self.node:
                by_node.setdefault(candidate.node, candidate)
        return list(by_node.values())

    async def _spread(self, weights: SharedWeights, receivers: list[ReceivesForNode]) -> NodeWeights:
        """Sends weights to these receivers, or to others in the place of those that end meanwhile."""
        while True:
            try:
                if receivers != self._members:
                    await self._form(receivers)
                copies = await self._send(weights)
            except _ReceiversEnded as ended:
                self._members = []
                for server, error in ended.errors.items():
                    if server not in self.replicas.servers:
                        raise error from None  # the one that joins: its starter is told
                    self.replicas.bury(server, error)
                receivers = self._receivers()
            else:
                by_node = {server.node: copy for server, copy in zip(receivers, copies, strict=True)}
                self._sent = NodeWeights(weights.manifest, {self.node: weights, **by_node})
                return self._sent

    async def _form(self, receivers: list[ReceivesForNode]) -> None:
        """Forms the group anew, with these receivers."""
        self._members = []
        if not receivers:
            return
        size = len(receivers) + 1
        first = self.ranks.first
        meeting: Meeting = await first.call("open_group", self.host, self.timeout_s, self.interface)
        joining = [
            server.join_group(meeting, rank, size, self.timeout_s) for rank, server in enumerate(receivers, 1)
        ]

        self._meeting = meeting
        await _all_of(receivers, partial(first.call, "join_group", size), joining, self._give_up)
        self._members = receivers

    async def _give_up(self, reason: str) -> None:
        """Ends the waits inside the group."""
        if self._meeting is not None:
            await asyncio.to_thread(WeightGroup.give_up, self._meeting, reason)

    async def _send(self, weights: SharedWeights) -> list[SharedWeights]:
        """Sends weights to the members of the group. Returns the copy of each."""
        members = self._members
        if not members:
            return []
        # A group that fails halfway isn't used again: what had come would be taken for the next version's.
        self._members = []
        collecting = [server.collect(weights.manifest) for server in members]
        send = partial(self.ranks.first.call, "send")
        copies = await _all_of(members, send, collecting, self._give_up)
        self._members = members
        return copies


class _ReceiversEnded(Exception):
    """The processes of some receivers have ended."""

    def __init__(self, errors: dict[ReceivesForNode, Exception]) -> None:
        super().__init__()
        self.errors = errors


async def _all_of(
    receivers: Sequence[ReceivesForNode],
    send: Callable[[], Pending],
    receiving: Sequence[Any],
    give_up: Callable[[str], Awaitable[object]],
) -> list[Any]:
    """The results of the receivers' calls, which run beside the sender's. One that fails makes all others
    fail by `give_up`, so its own error is the one that counts."""

    async def ending(call: Any) -> Any:
        async with AsyncExitStack() as on_error:
            on_error.push_async_callback(give_up, "one of those who send and receive them has failed")
            result = await call
            on_error.pop_all()
        return result

    async def sent() -> None:
        await asyncio.sleep(0)  # calls of a tick are sent at its end
        await send()

    # The receivers' calls are on their way first: a sender in this process blocks the event loop.
    *answers, _ = results = await asyncio.gather(*map(ending, [*receiving, sent()]), return_exceptions=True)
    ended: dict[ReceivesForNode, Exception] = {}
    for server, answer in zip(receivers, answers, strict=True):
        if isinstance(answer, ConnectionError):
            ended[server] = answer
    if ended:
        raise _ReceiversEnded(ended)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, LostWeightsError)):
        raise error
    return answers


def spawn_senders(
    cluster: Cluster,
    role: str,
    *,
    is_shared: bool,
    is_sharded: bool,
    dtype: str = "",
    speaker: int = 0,
) -> SendingRanks:
    """Makes a sender on each rank of a role, which has been spawned before. `is_shared`: servers in other
    processes read the weights. `is_sharded`: each rank holds only a share of them, and the `speaker` keeps
    what they gather."""
    workers = cluster.spawn(SENDER, partial(make_sender, role, is_shared), beside=role)
    return SendingRanks(workers, is_sharded, dtype, is_shared, speaker)
