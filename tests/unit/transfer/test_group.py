"""Weights between nodes: a group of the trainer and one receiver a node. The members are threads of this
process, which reach each other through loopback alone."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
import torch
from weight_ranks import Ranks

from turnwise.cluster.engine_senders import SendingEngines
from turnwise.cluster.weight_senders import SendingGroup, SendingRanks
from turnwise.errors import ConfigError, LostWeightsError, WorkerError
from turnwise.inference.server_manager import LLMServerManager
from turnwise.runtime.torch_group import Meeting
from turnwise.transfer import buckets
from turnwise.transfer.group import GroupWeights, NodeReceiver, NodeWeights
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.sender import WeightSender
from turnwise.transfer.shared_memory import SharedWeights
from turnwise.transfer.together import receive
from turnwise.transfer.weight_group import WeightGroup

TIMEOUT_S = 60.0
LONG_S = 600.0
"""Timeout of groups in which a member fails: who waits for it that long fails its test."""


class Server:
    """A server of a node, as a receiver."""

    def __init__(self, node: str, dies_in: str = "") -> None:
        self.node = node
        self.dies_in = dies_in
        self.num_joined = 0
        self._receiver = NodeReceiver()

    async def join_group(self, meeting: Meeting, rank: int, size: int, timeout_s: float) -> None:
        if self.dies_in == "join_group":
            self.dies_in = ""
            raise ConnectionError("gone")
        self.num_joined += 1
        await asyncio.to_thread(self._receiver.join_group, meeting, rank, size, timeout_s)

    async def collect(self, manifest: WeightManifest) -> SharedWeights:
        if self.dies_in == "collect":
            self._receiver._group = None  # as the end of its process closes its connections
            raise ConnectionError("gone")
        if self.dies_in == "silence":
            self.kept = self._receiver._group  # its connections stay open, and nothing comes
            raise ConnectionError("its node is silent")
        return await asyncio.to_thread(self._receiver.collect, manifest)


class Replicas:
    def __init__(self, *servers: Any) -> None:
        self.servers: list[Any] = list(servers)
        self.buried: list[Server] = []

    def bury(self, server: Server, error: Exception) -> None:
        self.servers.remove(server)
        self.buried.append(server)


class Trained:
    """Weights of several dtypes that change."""

    def __init__(self) -> None:
        self.value = 0.0

    def read(self) -> list[tuple[str, torch.Tensor]]:
        return [
            ("ids", torch.arange(5)),
            ("a", torch.full((300, 7), self.value)),
            ("b", torch.full((3,), self.value + 0.5, dtype=torch.bfloat16)),
            ("none", torch.empty(0)),
        ]


def sending_to(
    *servers: Server, timeout_s: float = TIMEOUT_S, dtype: str = ""
) -> tuple[SendingGroup, Replicas, Trained, Ranks]:
    trained, replicas = Trained(), Replicas(*servers)
    ranks = Ranks(WeightSender(trained.read, is_shared=True))
    sending = SendingGroup(SendingRanks(ranks, dtype=dtype), replicas, "home", "127.0.0.1", timeout_s)
    return sending, replicas, trained, ranks


def assert_has(weights: NodeWeights, nodes: list[str], value: float) -> None:
    assert list(weights.by_node) == nodes
    paths = {weights.on(node).path for node in nodes}
    assert len(paths) == len(nodes), "each node has a copy of its own"
    for node in nodes:
        tensors = dict(weights.on(node))
        assert tensors["ids"].tolist() == [0, 1, 2, 3, 4] and tensors["none"].numel() == 0
        assert tensors["a"].unique().tolist() == [value] and tensors["b"].unique().tolist() == [value + 0.5]


async def test_each_node_gets_one_copy_version_after_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1000)
    servers = [Server("home"), Server("x"), Server("y"), Server("y")]
    sending, _, trained, _ = sending_to(*servers)
    for version in (1.0, 2.0):
        trained.value = version
        assert_has(await sending.publish(), ["home", "x", "y"], version)
    assert [server.num_joined for server in servers] == [0, 1, 1, 0], "one of a node, and once"


@pytest.mark.skipif(sys.platform != "linux", reason="addresses of interfaces are asked of Linux")
async def test_weights_go_over_the_interface_that_is_named() -> None:
    sending, _, trained, _ = sending_to(Server("x"))
    sending.host = "192.0.2.1"  # nobody's
    sending.interface = "lo"
    trained.value = 2.0
    assert_has(await sending.publish(), ["home", "x"], 2.0)
    assert sending.ranks.workers.sender._group.meeting[::2] == ("127.0.0.1", "lo")
    sending.interface = "nothere0"
    sending.replicas.servers.append(Server("y"))
    with pytest.raises(ConfigError, match=r"cluster\.interface: nothere0: .* it has .*lo \(127\.0\.0\.1\)"):
        await sending.publish()


@pytest.mark.skipif(sys.platform != "linux", reason="addresses of interfaces are asked of Linux")
def test_a_receiver_listens_on_the_interface_that_is_named() -> None:
    opened = WeightGroup.open("127.0.0.1", 5.0)
    assert WeightGroup.find(opened.meeting._replace(interface="lo"), 5.0)._host == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"cluster\.interface: nothere0"):
        WeightGroup.find(opened.meeting._replace(interface="nothere0"), 5.0)


async def test_the_group_is_formed_anew_when_the_receivers_change() -> None:
    servers = [Server("x"), Server("y")]
    sending, replicas, trained, ranks = sending_to(*servers)
    await sending.publish()
    replicas.servers.remove(servers[1])
    trained.value = 2.0
    assert_has(await sending.publish(), ["home", "x"], 2.0)
    assert [server.num_joined for server in servers] == [2, 1]
    joining = Server("y")
    trained.value = 3.0  # the trainer has moved on since
    assert_has(await sending.publish_again(joining), ["home", "x", "y"], 2.0)
    assert ranks.calls.count("publish") == 2
    num_sent = ranks.calls.count("send")
    replicas.servers.append(joining)
    assert_has(await sending.publish_again(Server("y")), ["home", "x", "y"], 2.0)
    assert ranks.calls.count("send") == num_sent, "its node has them"


@pytest.mark.parametrize("step", ["join_group", "collect", "silence"])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_receiver_that_dies_leaves_and_the_others_get_the_version(step: str, place: int) -> None:
    """Whatever its place in the tree by which gloo sends, the others don't wait for it."""
    servers = [Server(node) for node in "wyz"]
    dying = Server("x", dies_in=step)
    servers.insert(place, dying)
    sending, replicas, trained, _ = sending_to(*servers, Server("x"), timeout_s=LONG_S)
    trained.value = 4.0
    async with asyncio.timeout(TIMEOUT_S):
        assert_has(await sending.publish(), ["home", "w", "y", "z", "x"], 4.0)
    assert replicas.buried == [dying]


async def test_the_error_of_the_first_who_fails_is_told_and_nobody_waits_for_it() -> None:
    class Lacking(Server):
        async def join_group(self, *_: Any) -> None:
            raise ConfigError("no such interface")

    sending, _, _, _ = sending_to(Server("x"), Lacking("y"), timeout_s=LONG_S)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ConfigError, match="no such interface"):
            await sending.publish()


async def test_weights_that_a_receiver_took_with_it_come_to_another_of_its_node() -> None:
    first, second, other = Server("x"), Server("x"), Server("y")
    sending, replicas, trained, _ = sending_to(first, second, other, timeout_s=LONG_S)
    trained.value = 2.0
    lost = (await sending.publish()).on("x")
    first._receiver._memory._file.close()  # as the end of its process does
    first.dies_in = "join_group"
    trained.value = 3.0
    with pytest.raises(LostWeightsError):
        iter(lost)
    assert_has(await sending.publish_again(second, is_lost=True), ["home", "x", "y"], 2.0)
    assert replicas.buried == [first]


async def test_a_server_that_joins_and_dies_is_told_to_its_starter() -> None:
    sending, replicas, _, _ = sending_to(Server("x"), timeout_s=LONG_S)
    await sending.publish()
    with pytest.raises(ConnectionError, match="gone"):
        await sending.publish_again(Server("y", dies_in="join_group"))
    assert replicas.buried == []


async def test_narrow_servers_get_narrow_weights() -> None:
    sending, _, trained, _ = sending_to(Server("x"), dtype="bfloat16")
    trained.value = 2.0
    weights = await sending.publish()
    assert dict(weights.on("x"))["a"].dtype is torch.bfloat16
    assert weights.manifest.num_bytes == 5 * 8 + 2 * (2100 + 3)


class Engine:
    """A server whose engine has two processes, each a member of the group."""

    def __init__(self, replica: int) -> None:
        self.replica = replica

    async def receive(self, weights: GroupWeights) -> list[dict[str, torch.Tensor]]:
        first_rank = weights.first_ranks[self.replica]
        members = (first_rank, first_rank + 1)
        return await asyncio.gather(*(asyncio.to_thread(self._received, weights, rank) for rank in members))

    def _received(self, weights: GroupWeights, rank: int) -> dict[str, torch.Tensor]:
        member = WeightGroup.find(weights.meeting, weights.timeout_s, name=weights.name)
        member.join(rank, weights.size)
        return dict(member.receive_tensors(weights.manifest))


async def test_processes_of_engines_are_members_of_a_group_for_each_version() -> None:
    engines = [Engine(0), Engine(3)]
    trained, replicas = Trained(), Replicas(*engines)
    ranks = Ranks(WeightSender(trained.read, is_shared=True))
    sending = SendingEngines(SendingRanks(ranks, dtype="bfloat16"), replicas, "127.0.0.1", 2, TIMEOUT_S)
    for version in (1.0, 2.0):
        trained.value = version
        weights = await sending.publish()
        assert weights.first_ranks == {0: 1, 3: 3} and weights.size == 5
        received = await asyncio.gather(*(engine.receive(weights.on("x")) for engine in engines))
        for tensors in [*received[0], *received[1]]:
            assert tensors["a"].unique().tolist() == [version] and tensors["a"].dtype is torch.bfloat16
    trained.value = 3.0  # the trainer has moved on since
    joining = Engine(1)
    weights = await sending.publish_again(joining)
    assert weights.first_ranks == {1: 1} and weights.size == 3
    assert (await joining.receive(weights))[1]["a"].unique().tolist() == [2.0]
    with pytest.raises(WorkerError, match="received by its members"):
        iter(weights)


class Served(Engine):
    """A replica that dies before its processes have joined."""

    def __init__(self, replica: int, num_deaths: int = 0) -> None:
        super().__init__(replica)
        self.num_deaths = num_deaths
        self.values: list[float] = []

    async def receive(self, weights: GroupWeights) -> int:
        if self.num_deaths:
            self.num_deaths -= 1
            raise ConnectionError("gone")
        first, second = await super().receive(weights)
        assert first["a"].equal(second["a"])
        self.values.append(float(first["a"][0, 0]))
        return 1


async def test_nobody_waits_for_a_replica_that_dies_before_it_receives() -> None:
    """The others get the weights once more, since they have none of them."""
    sound = [Served(0), Served(2)]
    manager = LLMServerManager([sound[0], Served(1, num_deaths=1), sound[1]])
    trained = Trained()
    ranks = Ranks(WeightSender(trained.read, is_shared=True))
    sending = SendingEngines(SendingRanks(ranks), manager, "127.0.0.1", 2, timeout_s=LONG_S)
    trained.value = 2.0
    async with asyncio.timeout(TIMEOUT_S):
        await manager.receive(await sending.publish(), sending.publish_again)
        assert manager.servers == tuple(sound) and [server.values for server in sound] == [[2.0]] * 2
        trained.value = 3.0
        await manager.receive(await sending.publish(), sending.publish_again)
    assert [server.values for server in sound] == [[2.0, 3.0]] * 2


async def test_the_next_version_does_not_wait_for_a_replica_that_died_as_it_joined() -> None:
    sound = Served(0)
    manager = LLMServerManager([sound])
    ranks = Ranks(WeightSender(Trained().read, is_shared=True))
    sending = SendingEngines(SendingRanks(ranks), manager, "127.0.0.1", 2, timeout_s=LONG_S)
    async with asyncio.timeout(TIMEOUT_S):
        await manager.receive(await sending.publish())
        with pytest.raises(ConnectionError):
            await receive(Served(1, num_deaths=1), await sending.publish_again(Served(1)))
        await manager.receive(await sending.publish())
    assert sound.values == [0.0, 0.0]


async def test_a_version_that_nobody_receives_does_not_stop_the_next_one() -> None:
    engine = Engine(0)
    trained, replicas = Trained(), Replicas(engine)
    ranks = Ranks(WeightSender(trained.read, is_shared=True))
    sending = SendingEngines(SendingRanks(ranks), replicas, "127.0.0.1", 2, timeout_s=2.0)
    await sending.publish()
    trained.value = 2.0
    sending.timeout_s = TIMEOUT_S
    received = await engine.receive(await sending.publish())
    assert received[0]["a"].unique().tolist() == [2.0]


async def test_the_sender_waits_until_all_have_received() -> None:
    """Members at the end of the tree by which gloo sends get it from others, and look into its store."""
    trained, engine = Trained(), Engine(0)
    ranks = Ranks(WeightSender(trained.read, is_shared=True))
    sending = SendingEngines(SendingRanks(ranks), Replicas(engine), "127.0.0.1", 2, TIMEOUT_S)
    weights = await sending.publish()

    def receive(rank: int) -> WeightGroup:
        member = WeightGroup.find(weights.meeting, weights.timeout_s, name=weights.name)
        member.join(rank, weights.size)
        coming = member.receive_tensors(weights.manifest)
        for _ in weights.manifest.tensors:
            next(coming)
        return member

    async with asyncio.timeout(TIMEOUT_S):
        members = await asyncio.gather(*(asyncio.to_thread(receive, rank) for rank in (1, 2)))
        await asyncio.sleep(0.2)
        assert sending._sending is not None and not sending._sending.done()
        for rank, member in enumerate(members, 1):
            member.finish([rank])
        await sending._end_sending()


async def test_the_rank_that_has_the_weights_sends_them() -> None:
    """With pipeline stages that is the first one of the last stage."""
    trained, replicas = Trained(), Replicas(Engine(0))
    first = WeightSender(trained.read, is_shared=True, keeps=False)
    speaker = WeightSender(trained.read, is_shared=True, rank=1)
    stages: Any = Stages(first, speaker)
    sending = SendingEngines(
        SendingRanks(stages, is_sharded=True, speaker=1), replicas, "127.0.0.1", 2, TIMEOUT_S
    )
    trained.value = 2.0
    async with asyncio.timeout(TIMEOUT_S):
        [received, _] = await Engine(0).receive(await sending.publish())
        again = await Engine(0).receive(await sending.publish_again(Engine(0)))
    assert received["a"].unique().tolist() == again[0]["a"].unique().tolist() == [2.0]


class Stages:
    """The workers of two ranks, of which the second one speaks for both."""

    def __init__(self, *senders: WeightSender) -> None:
        self._ranks = [Ranks(sender) for sender in senders]

    def at(self, rank: int) -> Ranks:
        return self._ranks[rank]

    def call(self, method: str, *args: Any, route: str = "broadcast") -> Any:
        calls = [rank.call(method, *args) for rank in self._ranks]
        return calls[1] if route == "broadcast" else calls[0]


def test_a_group_that_is_not_there_is_named() -> None:
    with pytest.raises(WorkerError, match=r"127.0.0.1:9: .*cluster.interface"):
        NodeReceiver().join_group(Meeting("127.0.0.1", 9), 1, 2, 0.5)
    with pytest.raises(WorkerError, match="joined no group"):
        NodeReceiver().collect(WeightManifest({}))
    with pytest.raises(WorkerError, match=r"the nodes 'x', and not to 'y'"):
        NodeWeights(WeightManifest({}), {"x": SharedWeights(WeightManifest({}), "")}).on("y")
