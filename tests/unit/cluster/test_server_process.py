"""Requests of a server in another process: those of one tick of the event loop travel together."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from functools import partial

import pytest

from turnwise.assemble.placement import set_torch_threads
from turnwise.cluster.channel import Channel
from turnwise.cluster.messages import SetUp
from turnwise.cluster.process import WorkerProcess
from turnwise.cluster.process_life import ForkedLife
from turnwise.cluster.server_process import SERVERS, ServerProcess
from turnwise.cluster.wire import ConnectionWire, Message
from turnwise.errors import DeadlineError
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog


class CountingWire(ConnectionWire):
    """Counts the messages in both directions."""

    num_sent = 0
    num_received = 0

    def send(self, message: Message) -> None:
        self.num_sent += 1
        super().send(message)

    def receive(self) -> Message:
        message = super().receive()
        self.num_received += 1
        return message


class Echo:
    """Answers `release` when as many calls wait as its argument says."""

    def __init__(self, rank: RankContext) -> None:
        self._num_waiting = 0
        self._is_cancelled = asyncio.Event()
        self._all_are_there = asyncio.Event()

    async def release(self, request_id: str) -> None:
        self._num_waiting += 1
        if self._num_waiting == int(request_id):
            self._all_are_there.set()
        try:
            await self._all_are_there.wait()
        except asyncio.CancelledError:
            self._is_cancelled.set()
            raise

    async def abort(self, request_id: str) -> None:
        if request_id == "end":
            os._exit(3)
        raise ValueError(request_id)

    async def resume(self, version: int) -> None:
        await self._is_cancelled.wait()

    def info(self) -> None: ...


@pytest.fixture
def server_and_wire():
    life = ForkedLife(f"{SERVERS}:serve")
    wire = CountingWire(life.connection)
    server = ServerProcess(
        WorkerProcess("the replica", life, Channel(wire, Stopwatch())), asyncio.run, Watchdog()
    )
    set_up = SetUp(dict(os.environ), list(sys.path), os.getcwd(), {}, partial(set_torch_threads, 1))
    server.begin(set_up, Echo, RankContext("actor_infer"))
    server.wait_until_ready()
    yield server, wire
    server.end()


def test_calls_of_one_tick_and_their_answers_are_one_message_each(server_and_wire):
    server, wire = server_and_wire
    num_sent = wire.num_sent
    num_received = wire.num_received

    async def play() -> None:
        await asyncio.gather(*(server.release("16") for _ in range(16)))

    asyncio.run(play())
    assert wire.num_sent == num_sent + 1
    assert wire.num_received == num_received + 1


def test_an_error_of_one_call_is_not_that_of_another(server_and_wire):
    server, _ = server_and_wire

    async def play() -> list[object]:
        calls = (server.abort("one"), server.release("1"), server.abort("two"))
        return await asyncio.gather(*calls, return_exceptions=True)

    one, none, two = asyncio.run(play())
    assert [str(one), none, str(two)] == ["one", None, "two"]


def test_all_calls_of_a_server_that_ends_fail(server_and_wire):
    server, _ = server_and_wire

    async def play() -> list[object]:
        waiting = asyncio.gather(
            server.release("2"), server.abort("end"), server.release("3"), return_exceptions=True
        )
        ended = await asyncio.wait_for(waiting, 60)
        return [*ended, *await asyncio.gather(server.release("1"), return_exceptions=True)]

    assert [type(error) for error in asyncio.run(play())] == [ConnectionError] * 4


def test_a_cancelled_call_is_cancelled_there(server_and_wire):
    server, _ = server_and_wire

    async def play() -> None:
        waiting = asyncio.create_task(server.release("9"))
        # The answer to a later call shows that the first one has begun.
        await asyncio.gather(server.abort("one"), return_exceptions=True)
        waiting.cancel()
        await asyncio.wait_for(server.resume(1), 60)

    asyncio.run(play())


class HeldStart:
    """Starts a process when it may, and notes it."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_start = threading.Event()
        self.started: list[WorkerProcess] = []

    def __call__(self) -> WorkerProcess:
        self.has_begun.set()
        self.may_start.wait()
        self.started.append(WorkerProcess.fork("the replica", SERVERS, Stopwatch()))
        return self.started[0]


@pytest.mark.parametrize("ends_by", ["deadline", "cancellation"])
def test_a_process_that_starts_too_late_is_ended(server_and_wire, ends_by):
    """As on a node of Ray that is lost: its actor may never start."""
    server, _ = server_and_wire
    held = server._start_process = HeldStart()

    async def play() -> None:
        again = asyncio.create_task(server.started_again(0.2 if ends_by == "deadline" else 600.0))
        await asyncio.to_thread(held.has_begun.wait)
        if ends_by == "cancellation":
            again.cancel()
        with pytest.raises(DeadlineError if ends_by == "deadline" else asyncio.CancelledError):
            await again

    asyncio.run(play())
    held.may_start.set()
    while not (held.started and has_ended(held.started[0])):
        time.sleep(0.01)


def has_ended(process: WorkerProcess) -> bool:
    try:
        os.kill(process.life.process_id, 0)
    except ProcessLookupError:
        return True
    return False
