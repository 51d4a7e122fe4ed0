from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from turnwise.errors import DeadlineError, ServerError
from turnwise.inference.server_manager import AsyncLLMServerManager, AsyncServer, LLMServerManager
from turnwise.protocols import InferenceServer
from turnwise.types import Completion, Media, SamplingParams, VersionRun


class FakeServer:
    """Answers with its own name as token once `gate` is open, or fails as told."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.seen: list[tuple[str, int]] = []
        self.calls: list[str] = []

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, request_id: str, media: Sequence[Media] = ()
    ) -> Completion:
        self.seen.append((request_id, sampling.seed))
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return Completion(np.array([self.name]), np.zeros(1, np.float32), "stop", (VersionRun(0, 1),))

    async def abort(self, request_id: str) -> None:
        self.calls.append(f"abort {request_id}")

    async def release(self, request_id: str) -> None:
        self.calls.append(f"release {request_id}")

    async def suspend(self, on_weight_update: str = "finish") -> None:
        self.calls.append(f"suspend {on_weight_update}")
        await self.gate.wait()

    async def resume(self, version: int) -> None:
        self.calls.append(f"resume {version}")

    async def sleep(self, kinds: object) -> None: ...

    async def wake(self, kinds: object) -> None: ...

    async def close(self) -> None:
        self.calls.append("close")


async def ask(manager: LLMServerManager, request_id: str, prompt_length: int = 3) -> int:
    return int((await manager.generate([1] * prompt_length, SamplingParams(5, seed=8), request_id)).token_ids[0])


def test_published_names() -> None:
    assert AsyncLLMServerManager is LLMServerManager and AsyncServer is InferenceServer


def test_conversations_stay_and_new_ones_go_where_fewest_tokens_are_in_flight() -> None:
    async def scenario() -> None:
        servers = [FakeServer(0), FakeServer(1)]
        manager = LLMServerManager(servers)
        for server in servers:
            server.gate.clear()
        tasks = [asyncio.create_task(ask(manager, "long", 100))]
        await asyncio.sleep(0)
        for index in range(3):
            tasks.append(asyncio.create_task(ask(manager, f"short{index}", 10)))
            await asyncio.sleep(0)
        for server in servers:
            server.gate.set()
        assert await asyncio.gather(*tasks) == [0, 1, 1, 1]
        assert await ask(manager, "short1") == 1
        assert await ask(manager, "new") == 0
        await manager.release("short1")
        assert servers[1].calls == ["release short1"]
        assert await ask(manager, "short1") == 0

    asyncio.run(scenario())


def test_memory_of_conversations_is_bounded() -> None:
    async def scenario() -> None:
        manager = LLMServerManager([FakeServer(0)], max_conversations=3)
        for index in range(10):
            await ask(manager, f"c{index}")
        assert len(manager._replica_of) == 3

    asyncio.run(scenario())


def test_a_dead_replica_is_left_with_the_same_prompt_and_seed() -> None:
    async def scenario() -> None:
        servers = [FakeServer(0), FakeServer(1)]
        manager = LLMServerManager(servers)
        assert await ask(manager, "c") == 0
        servers[0].failure = ConnectionError("gone")
        assert await ask(manager, "c") == 1
        assert servers[1].seen == [("c", 8)]
        assert manager.servers == (servers[1],)
        servers[1].failure = ConnectionError("gone too")
        with pytest.raises(ServerError, match="gone too") as caught:
            await ask(manager, "c")
        assert caught.value.__cause__ is servers[1].failure

    asyncio.run(scenario())


def test_a_refused_request_kills_nobody() -> None:
    async def scenario() -> None:
        servers = [FakeServer(0), FakeServer(1)]
        manager = LLMServerManager(servers)
        servers[0].failure = ServerError("too long")
        with pytest.raises(ServerError, match="too long"):
            await ask(manager, "c")
        assert len(manager.servers) == 2
        assert set(manager._tokens_in_flight.values()) == {0}

    asyncio.run(scenario())


class StuckServer(FakeServer):
    """Never answers, whatever it is asked."""

    async def _wait(self, *_: object) -> None:
        await asyncio.Event().wait()

    generate = abort = release = suspend = resume = sleep = wake = close = _wait  # type: ignore[assignment]


CALLS: dict[str, tuple[Callable[[LLMServerManager], Awaitable[Any]], str]] = {
    "generate": (lambda manager: ask(manager, "c"), "conversation 'c' waited 0.01 s for inference replica 0 to answer"),
    "abort": (
        lambda manager: manager.abort("c"),
        "conversation 'c' waited 0.01 s for inference replica 0 to abort its request",
    ),
    "release": (lambda manager: manager.release("c"), "for inference replica 0 to release its cache"),
    "suspend": (lambda manager: manager.suspend(), "a weight update waited 0.01 s for inference replica 0 to end its requests"),
    "resume": (lambda manager: manager.resume(1), "a weight update waited 0.01 s for inference replica 0 to admit"),
    "sleep": (lambda manager: manager.sleep(["kv_cache"]), "the pipeline waited 0.01 s for inference replica 0 to free memory"),
    "wake": (lambda manager: manager.wake(["kv_cache"]), "the pipeline waited 0.01 s for inference replica 0 to take"),
    "close": (lambda manager: manager.close(), "the end of the run waited 0.01 s for inference replica 0 to close"),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_a_deadline_that_names_who_waits_for_whom(name: str) -> None:
    call, message = CALLS[name]

    async def scenario() -> None:
        manager = LLMServerManager([StuckServer(0)], request_s=0.01)
        manager._route("c")
        with pytest.raises(DeadlineError, match=re.escape(message)) as caught:
            await call(manager)
        assert "raise deadlines.request_s" in str(caught.value)
        assert set(manager._tokens_in_flight.values()) == {0}

    asyncio.run(scenario())


def test_a_replica_that_does_not_answer_is_not_waited_for_again() -> None:
    async def scenario() -> None:
        manager = LLMServerManager([StuckServer(0)], request_s=0.05)
        with pytest.raises(DeadlineError):
            await ask(manager, "c")
        await asyncio.wait_for(asyncio.gather(manager.release("c"), manager.close()), timeout=0.04)

    asyncio.run(scenario())


def test_a_replica_s_own_timeout_is_its_death_and_no_deadline() -> None:
    async def scenario() -> None:
        servers = [FakeServer(0), FakeServer(1)]
        servers[0].failure = TimeoutError("socket")
        assert await ask(LLMServerManager(servers, request_s=5.0), "c") == 1

    asyncio.run(scenario())


def test_updates_reach_every_replica() -> None:
    async def scenario() -> None:
        servers = [FakeServer(0), FakeServer(1)]
        manager = LLMServerManager(servers)
        await manager.suspend("abort_continue")
        await manager.resume(4)
        await manager.close()
        assert servers[0].calls == servers[1].calls == ["suspend abort_continue", "resume 4", "close"]

    asyncio.run(scenario())
