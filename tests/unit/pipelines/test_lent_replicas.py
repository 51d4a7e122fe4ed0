"""Replicas on the trainer's devices leave while training computes, and come back with the current weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from small_configs import config_of

from turnwise.config.place import lent_replicas, place
from turnwise.inference.server_manager import LLMServerManager
from turnwise.pipelines.lent_replicas import LentReplicas
from turnwise.pipelines.shared_devices import Resident, SharedDevices
from turnwise.runtime.device_use import DeviceUse
from turnwise.runtime.machine import Machine, Node
from turnwise.types import Completion, FinishReason, Media, SamplingParams, VersionRun

SAMPLING = SamplingParams(max_new_tokens=4)


class Replica:
    """Answers with its own number, one token at a time as the test lets it, until four are there."""

    def __init__(self, number: int, device: set[str]) -> None:
        self.number = number
        self.device = device
        """What lies on the devices that are shared."""
        self.turn = asyncio.Event()
        self.is_suspended = False
        self.is_broken = False
        self.version = 0
        self.partials: list[list[int]] = []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
        partial_ids: Sequence[int] = (),
    ) -> Completion:
        self.partials.append(list(partial_ids))
        tokens = [self.number]
        await self.turn.wait()
        reason: FinishReason = "stop"
        if self.is_suspended:
            reason = "aborted"
        return Completion(np.array(tokens), np.zeros(1, np.float32), reason, (VersionRun(self.version, 1),))

    async def suspend(self, suspension: str = "finish") -> None:
        self.is_suspended = suspension == "abort"
        self.turn.set()

    async def resume(self, version: int) -> None:
        self.is_suspended = False
        self.version = version

    async def sleep(self, kinds: list[str]) -> None:
        self.device -= {f"replica {self.number}"}

    async def wake(self, kinds: list[str]) -> None:
        if self.is_broken:
            raise ConnectionError("gone")
        self.device |= {f"replica {self.number}"}

    async def close(self) -> None:
        self.device.discard("open")


class Shared:
    """Two replicas, of which the first shares its device with the trainer."""

    def __init__(self, on_weight_update: str = "finish") -> None:
        self.device = {"replica 0"}
        self.lent = Replica(0, self.device)
        self.staying = Replica(1, set())
        self.servers = LLMServerManager([self.lent, self.staying])
        self.replicas = LentReplicas(
            self.servers, lambda server: server is self.lent, on_weight_update, self.admit
        )
        trainer = Resident(
            frozenset({0}), frozenset({"weights", "optimizer"}), self.offload_trainer, self.onload_trainer
        )
        trainer.present.clear()
        lent = Resident(frozenset({0}), frozenset({"kv_cache"}), self.replicas.leave, self.replicas.come_back)
        self.shared = SharedDevices({"actor_train": trainer, "lent": lent})

    async def admit(self, server: Replica) -> None:
        await server.resume(7)
        self.servers.join(server)

    async def offload_trainer(self, kinds: list[str]) -> None:
        self.device -= set(kinds)

    async def onload_trainer(self, kinds: list[str]) -> None:
        assert "replica 0" not in self.device, "trainer and replica are there together"
        self.device |= set(kinds)


def test_while_training_computes_the_replica_is_away_and_then_it_has_the_new_weights() -> None:
    run = Shared()
    asyncio.run(run.shared.claim("actor_train"))
    assert run.servers.servers == (run.staying,) and run.device == {"weights", "optimizer"}
    asyncio.run(run.shared.claim("actor_train"))
    asyncio.run(run.shared.claim("lent"))
    assert run.servers.servers == (run.lent, run.staying) and run.device == {"replica 0"}
    assert run.lent.version == 7
    [metric] = run.replicas.measured()
    assert metric.name == "time/lent_s" and metric.value > 0
    asyncio.run(run.shared.claim("lent"))


@pytest.mark.parametrize(
    ("on_weight_update", "tokens"),
    [("finish", [0]), ("keep", [0]), ("abort_continue", [0, 1]), ("abort_restart", [1])],
)
def test_running_responses_end_or_move(on_weight_update: str, tokens: list[int]) -> None:
    run = Shared(on_weight_update)
    run.staying.turn.set()

    async def play() -> Completion:
        response = asyncio.create_task(run.servers.generate([1], SAMPLING, "a"))
        await asyncio.sleep(0)
        await run.shared.claim("actor_train")
        return await response

    completion = asyncio.run(play())
    assert completion.token_ids.tolist() == tokens and completion.finish_reason == "stop"
    if on_weight_update == "abort_continue":
        assert run.staying.partials == [[0]]


def test_a_replica_that_dies_while_it_is_away_is_found_dead_when_it_comes_back() -> None:
    run = Shared()
    asyncio.run(run.shared.claim("actor_train"))
    run.lent.is_broken = True
    asyncio.run(run.shared.claim("lent"))
    assert run.servers.servers == (run.staying,)


def test_a_run_that_ends_meanwhile_closes_the_replica_too() -> None:
    run = Shared()
    run.device.add("open")
    asyncio.run(run.shared.claim("actor_train"))
    asyncio.run(run.servers.close())
    assert "open" not in run.device


class Memory:
    """The bytes of a device that lent replicas and training share. More than its capacity is a fault."""

    CAPACITY = 80
    SIZES: ClassVar[dict[str, int]] = {"weights": 20, "optimizer": 40, "kv_cache": 60}

    def __init__(self) -> None:
        self.present = {("replica 0", "weights"), ("replica 0", "kv_cache")}
        self.largest = 0

    def resident(self, owner: str, *kinds: str) -> Resident:
        async def offload(leaving: list[str]) -> None:
            self.present -= {(owner, kind) for kind in leaving}

        async def onload(coming: list[str]) -> None:
            self.present |= {(owner, kind) for kind in coming}
            used = sum(self.SIZES[kind] for _, kind in self.present)
            assert used <= self.CAPACITY, sorted(self.present)
            self.largest = max(self.largest, used)

        return Resident(frozenset({0}), frozenset(kinds), offload, onload)


def test_in_a_step_memory_of_a_replica_and_of_training_take_turns() -> None:
    """Reference, old log-probs, values, critic and policy come one after the other, while the other replica
    samples; then the lent one is back with its cache."""
    memory, run = Memory(), Shared("abort_continue")
    cache = memory.resident("replica 0", "kv_cache")

    async def leave(kinds: list[str]) -> None:
        await run.replicas.leave(kinds)
        await cache.offload(kinds)

    async def come_back(kinds: list[str]) -> None:
        await cache.onload(kinds)
        await run.replicas.come_back(kinds)

    training = {name: memory.resident(name, "weights", "optimizer") for name in ("actor_train", "critic")}
    training["reference"] = memory.resident("reference", "weights")
    for resident in training.values():
        resident.present.clear()
    shared = SharedDevices({**training, "lent": Resident(frozenset({0}), cache.kinds, leave, come_back)})

    async def step() -> None:
        for role in ("reference", "actor_train", "critic"):
            await shared.claim(role, ["weights"])
            assert run.servers.servers == (run.staying,)
            run.staying.turn.set()
            assert (await run.servers.generate([1], SAMPLING, role)).token_ids.tolist() == [1]
        for role in ("critic", "actor_train"):
            await shared.claim(role)
        await shared.claim("lent")

    asyncio.run(step())
    assert memory.present == {("replica 0", "weights"), ("replica 0", "kv_cache")}
    assert memory.largest == memory.CAPACITY
    assert run.servers.servers == (run.lent, run.staying)


def test_the_idle_share_of_each_device() -> None:
    """Device 0 trains for 4 of 10 seconds, while a response of 6 seconds runs on it or, since it is lent, on
    device 1."""
    run, seconds = Shared(), [0.0]
    use = DeviceUse([0, 1], lambda: seconds[0])
    run.servers.use_devices = lambda server: use.using([server.number])

    async def step() -> None:
        for replica in (run.lent, run.staying):
            replica.turn.clear()
        response = asyncio.create_task(run.servers.generate([1], SAMPLING, "a"))
        await asyncio.sleep(0)
        seconds[0] += 6.0
        for replica in (run.lent, run.staying):
            replica.turn.set()
        await response
        await run.shared.claim("actor_train")
        with use.using([0]):
            seconds[0] += 4.0

    asyncio.run(step())
    assert use.idle_shares() == pytest.approx({0: 0.0, 1: 1.0})
    asyncio.run(step())
    assert use.idle_shares() == pytest.approx({0: 0.6, 1: 0.4})


AHEAD = {"async_generation_ratio": 1}
FOUR = Machine((Node(4, "cuda"),))


@pytest.mark.parametrize(
    ("trained", "served", "changes", "lent"),
    [
        ([0, 1], [0, 1, 2, 3], AHEAD, [0, 1]),
        ([3], [0, 1, 2, 3], AHEAD, [3]),
        ([0, 1], [2, 3], AHEAD, []),
        ([0, 1, 2, 3], [2, 3, 1, 0], {}, []),
    ],
)
def test_which_replicas_make_room(trained, served, changes, lent) -> None:
    config = config_of(
        **{"actor_train.device_mapping": trained, "actor_infer.device_mapping": served, **changes}
    )
    assert lent_replicas(config, place(config, FOUR)) == lent


def test_a_replica_of_two_devices_makes_room_if_one_of_them_trains() -> None:
    strategy = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": 2}}
    config = config_of(
        actor_train={"device_mapping": [0]},
        actor_infer={"strategy_args": strategy, "device_mapping": [0, 1, 2, 3]},
        **AHEAD,
    )
    assert lent_replicas(config, place(config, FOUR)) == [0]
