"""The order of an update: who is suspended before the trainer gathers, who stays at which version, and what
ends a transfer that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from turnwise.errors import DeadlineError, LostWeightsError
from turnwise.inference.restarts import Restarts
from turnwise.inference.server_manager import LLMServerManager
from turnwise.protocols import WeightSource
from turnwise.testing.fakes import ScriptedServer
from turnwise.transfer.live import LiveWeights, manifest_of
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.policy_transfer import PolicyTransfer

A = ("a", torch.ones(2, 3))


class Sender:
    """Publishes one tensor that counts the versions, and notes when."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.num_published = 0
        self.again: list[tuple[object, bool]] = []

    async def manifest(self) -> WeightManifest:
        return manifest_of([A])

    async def publish(self) -> WeightSource:
        self.events.append("publish")
        self.num_published += 1
        return await self.publish_again()

    async def publish_again(self, server: object = None, is_lost: bool = False) -> WeightSource:
        self.again.append((server, is_lost))
        values = torch.full((2, 3), float(self.num_published))
        return LiveWeights(manifest_of([A]), lambda: [("a", values)])


class NotingServer(ScriptedServer):
    """Has a copy of the weights, and breaks or hangs in the middle of receiving them."""

    def __init__(self, name: str, events: list[str], fault: str = "") -> None:
        super().__init__([])
        self.name = name
        self.events = events
        self.fault = fault
        self.num_losses = 1
        self.value = 0.0

    async def begin_update(self, manifest: WeightManifest) -> None:
        self.events.append(f"{self.name} begin_update")

    async def suspend(self, suspension: str = "finish") -> None:
        self.events.append(f"{self.name} suspend")

    async def receive(self, weights: WeightSource) -> int:
        if self.fault == "loses" and self.num_losses:
            self.num_losses -= 1
            raise LostWeightsError("they are gone")
        if self.fault == "breaks":
            raise ConnectionError("gone in the middle")
        if self.fault == "hangs":
            await asyncio.Event().wait()
        [(_, tensor)] = weights
        self.value = float(tensor[0, 0])
        self.events.append(f"{self.name} receive")
        return tensor.nbytes

    async def resume(self, version: int) -> None:
        self.events.append(f"{self.name} resume {version}")
        await super().resume(version)

    def info(self):
        info = super().info()
        return type(info)(info.model, info.engine, 0, 0, needs_weights=True)


@pytest.mark.parametrize("suspends_first", [True, False])
async def test_servers_that_share_the_trainer_s_memory_are_suspended_before_it_gathers(
    suspends_first: bool,
) -> None:
    events: list[str] = []
    manager = LLMServerManager([NotingServer("x", events)])
    await PolicyTransfer(manager, Sender(events), suspends_first=suspends_first).update(1)
    middle = ["x suspend", "publish"] if suspends_first else ["publish", "x suspend"]
    assert events == ["x begin_update", *middle, "x receive", "x resume 1"]


@pytest.mark.parametrize("fault", ["breaks", "hangs"])
async def test_a_replica_loads_a_version_whole_or_leaves(fault: str) -> None:
    events: list[str] = []
    sound, broken = NotingServer("x", events), NotingServer("y", events, fault)
    manager = LLMServerManager([sound, broken], request_s=0.05)
    started: list[object] = []
    again = NotingServer("z", events)

    async def start(server: object) -> NotingServer:
        started.append(server)
        return again

    transfer = PolicyTransfer(manager, Sender(events))
    manager.restarts = Restarts(start, transfer.join)
    await transfer.update(1)
    assert manager.servers[0] is sound and "y resume 1" not in events
    await manager.restarts.next_end()
    assert started == [broken] and manager.servers == (sound, again)
    assert (sound.value, again.value, again.version) == (1.0, 1.0, 1)


async def test_replicas_that_lose_the_weights_get_them_once_more() -> None:
    """The process that had them for their node has ended: they are whole, and don't count a death."""
    events: list[str] = []
    faults = {"x": "", "y": "loses", "z": "loses"}
    servers = [NotingServer(name, events, fault) for name, fault in faults.items()]
    manager = LLMServerManager(servers)
    sender = Sender(events)
    transfer = PolicyTransfer(manager, sender)
    metrics = {metric.name: metric.value for metric in await transfer.update(1)}
    assert manager.servers == tuple(servers)
    assert [server.value for server in servers] == [1.0] * 3
    assert metrics["weights/copied_bytes"] == 3 * 24
    assert sender.again[1:] == [(servers[1], True), (servers[2], False)], "they are sent once"
    servers[2].num_losses = 2
    await transfer.update(2)
    assert manager.servers == tuple(servers[:2]), "one that loses them again is dead"
    joining = NotingServer("w", events, "loses")
    await transfer.join(joining)
    assert sender.again[-2:] == [(joining, False), (joining, True)] and joining.value == 2.0


async def test_a_replica_that_joins_in_an_update_gets_the_new_version() -> None:
    events: list[str] = []
    manager = LLMServerManager([NotingServer("x", events)])
    transfer = PolicyTransfer(manager, Sender(events))
    await transfer.update(1)
    joining = NotingServer("y", events)
    events.clear()
    await asyncio.gather(transfer.update(2), transfer.join(joining))
    assert (joining.value, joining.version) == (2.0, 2)
    assert events.index("y begin_update") > events.index("x resume 2"), "one after the other"
    assert events.count("publish") == 1, "the trainer may have moved on"
    metrics = {metric.name: metric.value for metric in await transfer.update(3)}
    assert joining.value == 3.0 and metrics["system/replica_restarts"] == 1


async def test_a_replica_that_joins_before_the_first_update_keeps_what_it_has_loaded() -> None:
    events: list[str] = []
    manager = LLMServerManager([NotingServer("x", events)])
    transfer = PolicyTransfer(manager, Sender(events))
    await transfer.join(NotingServer("y", events))
    assert events == [] and len(manager.servers) == 2


async def test_a_transfer_that_hangs_lets_the_event_loop_run_and_is_named() -> None:
    events: list[str] = []
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            num_ticks += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    manager = LLMServerManager([NotingServer("x", events, "hangs")])
    transfer = PolicyTransfer(manager, Sender(events), timeout_s=0.1)
    with pytest.raises(DeadlineError, match=r"(?s)the weights of version 1.*deadlines.weights_s.*in receive"):
        await transfer.update(1)
    ticking.cancel()
    assert num_ticks > 2


async def test_a_model_of_this_process_is_filled_beside_the_event_loop(tiny_server) -> None:
    """What the trainer gathers may take long, or hang."""
    seen: list[bool] = []

    def read() -> Iterator[tuple[str, Tensor]]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            seen.append(True)
        yield from tiny_server.model.named_parameters()

    weights = LiveWeights.of(read)
    seen.clear()
    await tiny_server.begin_update(weights.manifest)
    await tiny_server.receive(weights)
    assert seen == [True]
    await tiny_server.close()


@pytest.fixture
def tiny_server():
    from toy_model import toy_model

    from turnwise.inference.embedded.server import EmbeddedServer

    return EmbeddedServer(toy_model())
