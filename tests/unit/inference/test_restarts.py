"""Replicas that are started again: what their requests do meanwhile, and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from turnwise.errors import ReplicasDeadError
from turnwise.inference.restarts import MAX_DEATHS, WINDOW_S, Restarts
from turnwise.inference.server_manager import LLMServerManager
from turnwise.types import Completion, Media, SamplingParams, VersionRun


class Replica:
    """Answers with its own number as a token, breaks, or never answers."""

    def __init__(self, number: int, breaks: bool = False, hangs: bool = False) -> None:
        self.number = number
        self.breaks = breaks
        self.hangs = hangs
        self.is_closed = False

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
        partial_ids: Sequence[int] = (),
    ) -> Completion:
        if self.breaks:
            raise ConnectionError("gone")
        if self.hangs:
            await asyncio.Event().wait()
        return Completion(np.array([self.number]), np.zeros(1, np.float32), "stop", (VersionRun(0, 1),))

    async def close(self) -> None:
        self.is_closed = True


class Starter:
    """Starts replicas: those that are given, one after the other, or fails if none is left."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = list(replicas)
        self.gate = asyncio.Event()
        self.gate.set()
        self.ended: list[Replica] = []

    async def start(self, server: Replica) -> Replica:
        self.ended.append(server)
        await self.gate.wait()
        if not self.replicas:
            raise ConnectionError("no memory")
        return self.replicas.pop(0)


def manager_of(
    replicas: Sequence[Replica], starter: Starter, now: float = 0.0, request_s: float | None = None
) -> LLMServerManager:
    manager = LLMServerManager(replicas, request_s=request_s)

    async def admit(server: Replica) -> None:
        manager.join(server)

    manager.restarts = Restarts(starter.start, admit, now=lambda: now)
    return manager


async def ask(manager: LLMServerManager, request_id: str = "c") -> int:
    completion = await manager.generate([1, 2], SamplingParams(5), request_id)
    return int(completion.token_ids[0])


async def test_requests_go_elsewhere_until_a_dead_replica_is_back() -> None:
    starter = Starter(Replica(2))
    starter.gate.clear()
    broken = Replica(0, breaks=True)
    manager = manager_of([broken, Replica(1)], starter)
    assert await ask(manager) == 1
    assert await ask(manager, "other") == 1 and len(manager.servers) == 1
    starter.gate.set()
    await manager.restarts.next_end()
    assert starter.ended == [broken]
    assert await ask(manager, "new") == 2, "the least loaded with the lowest number"


async def test_a_late_error_of_a_dead_replica_leaves_the_one_in_its_place_alone() -> None:
    broken, again = Replica(0, breaks=True), Replica(2)
    manager = manager_of([broken, Replica(1)], Starter(again))
    await ask(manager)
    await manager.restarts.next_end()
    manager.bury(broken, ConnectionError("late"))
    assert again in manager.servers


async def test_a_replica_that_is_started_again_keeps_its_number() -> None:
    """Its deaths count by it: three of two replicas would end one that died once."""
    gates = {number: asyncio.Event() for number in (0, 1)}
    dead = [Replica(number) for number in (0, 1)]
    manager = LLMServerManager([*dead, Replica(2)])

    async def start(server: Replica) -> Replica:
        await gates[server.number].wait()
        return Replica(10 + server.number)

    async def admit(server: Replica) -> None:
        manager.join(server)

    manager.restarts = Restarts(start, admit, now=lambda: 0.0)
    for server in dead:
        manager.bury(server, ConnectionError("gone"))
    for number in (1, 0):
        gates[number].set()
        await manager.restarts.next_end()
        assert manager._servers[number].number == 10 + number
    assert [server.number for server in manager.servers] == [10, 11, 2]
    manager.join(Replica(3))
    assert manager._servers[3].number == 3, "a new one"


async def test_a_new_replica_takes_no_number_of_one_that_is_away() -> None:
    class Lendable(Replica):
        async def suspend(self) -> None: ...

    starter = Starter(Replica(9))
    starter.gate.clear()
    lent, broken = Lendable(0), Replica(1)
    manager = manager_of([lent, broken, Replica(2)], starter)
    await manager.lend(lent)
    manager.bury(broken, ConnectionError("gone"))
    manager.join(Replica(3))
    manager.join(lent)
    starter.gate.set()
    await manager.restarts.next_end()
    assert {index: server.number for index, server in manager._servers.items()} == {0: 0, 1: 9, 2: 2, 3: 3}


async def test_requests_wait_if_the_only_replica_is_started_again() -> None:
    starter = Starter(Replica(2))
    starter.gate.clear()
    manager = manager_of([Replica(0, breaks=True)], starter)
    asked = asyncio.create_task(ask(manager))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not asked.done()
    starter.gate.set()
    assert await asked == 2


async def test_an_overdue_replica_is_started_again_and_its_request_is_answered_elsewhere() -> None:
    stuck = Replica(0, hangs=True)
    starter = Starter(Replica(2))
    manager = manager_of([stuck, Replica(1)], starter, request_s=0.05)
    assert await ask(manager) == 1
    await manager.restarts.next_end()
    assert starter.ended == [stuck] and len(manager.servers) == 2


@pytest.mark.parametrize("num_starts", [0, MAX_DEATHS - 1])
async def test_a_replica_that_dies_too_often_stays_dead(num_starts: int, caplog) -> None:
    """Starts that fail count as deaths."""
    starter = Starter(*(Replica(number, breaks=True) for number in range(2, 2 + num_starts)))
    manager = manager_of([Replica(0, breaks=True)], starter)
    with pytest.raises(ReplicasDeadError, match="gone"):
        await ask(manager)
    assert len(starter.ended) == MAX_DEATHS - 1
    assert "stays dead" in caplog.text or "isn't started again" in caplog.text


async def test_deaths_of_long_ago_do_not_count() -> None:
    restarts = Restarts(Starter().start, Starter().start)
    times = iter([0.0, 1.0, WINDOW_S + 0.5, WINDOW_S + 0.6])
    restarts._now = lambda: next(times)
    assert [restarts._may_start(0) for _ in range(4)] == [True, True, True, False]


async def test_a_start_is_given_up_at_the_end_of_the_run() -> None:
    starter = Starter(Replica(2))
    starter.gate.clear()
    broken = Replica(0, breaks=True)
    manager = manager_of([broken, Replica(1)], starter)
    await ask(manager)
    await asyncio.sleep(0)
    await manager.close()
    assert broken.is_closed and not manager.restarts.is_busy


async def test_an_overdue_replica_that_stays_dead_is_ended() -> None:
    """It would hold its devices until the end of the run."""
    stuck = [Replica(number, hangs=True) for number in range(MAX_DEATHS)]
    manager = manager_of(stuck[:1], Starter(*stuck[1:]), request_s=0.02)
    with pytest.raises(ReplicasDeadError):
        await ask(manager)
    assert stuck[-1].is_closed


async def test_a_replica_that_never_gets_the_weights_is_ended() -> None:
    started = Replica(1)
    starter = Starter(started)

    async def refuse(server: Replica) -> None:
        raise ConnectionError("no weights")

    restarts = Restarts(starter.start, refuse, now=lambda: 0.0)
    broken = Replica(0, breaks=True)
    assert restarts.begin(broken, 0)
    while restarts.is_busy:
        await restarts.next_end()
    assert started.is_closed
