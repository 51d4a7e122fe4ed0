from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from turnwise.errors import DeadlineError, ReplicasDeadError, ServerError
from turnwise.inference import server_manager
from turnwise.inference.server_manager import AsyncLLMServerManager, AsyncServer, LLMServerManager
from turnwise.protocols import InferenceServer, OnWeightUpdate
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
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
        partial_ids: Sequence[int] = (),
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

    async def suspend(self, suspension: str = "finish") -> None:
        self.calls.append(f"suspend {suspension}")
        await self.gate.wait()

    async def resume(self, version: int) -> None:
        self.calls.append(f"resume {version}")

    async def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def servers() -> list[FakeServer]:
    return [FakeServer(0), FakeServer(1)]


@pytest.fixture
def manager(servers: list[FakeServer]) -> LLMServerManager:
    return LLMServerManager(servers)


async def ask(manager: LLMServerManager, request_id: str, prompt_length: int = 3) -> int:
    return int(
        (await manager.generate([1] * prompt_length, SamplingParams(5, seed=8), request_id)).token_ids[0]
    )


async def let_tasks_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_published_names() -> None:
    assert AsyncLLMServerManager is LLMServerManager and AsyncServer is InferenceServer


async def test_conversations_stay_and_new_ones_go_where_fewest_tokens_are_in_flight(
    servers: list[FakeServer], manager: LLMServerManager
) -> None:
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


async def test_memory_of_conversations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_manager, "_MAX_CONVERSATIONS", 3)
    manager = LLMServerManager([FakeServer(0)])
    for index in range(10):
        await ask(manager, f"c{index}")
    assert len(manager._replica_of) == 3


async def test_a_dead_replica_is_left_with_the_same_prompt_and_seed(
    servers: list[FakeServer], manager: LLMServerManager
) -> None:
    assert await ask(manager, "c") == 0
    servers[0].failure = ConnectionError("gone")
    assert await ask(manager, "c") == 1
    assert servers[1].seen == [("c", 8)]
    assert manager.servers == (servers[1],)
    servers[1].failure = ConnectionError("gone too")
    with pytest.raises(ServerError, match="gone too") as caught:
        await ask(manager, "c")
    assert caught.value.__cause__ is servers[1].failure


async def test_a_refused_request_kills_nobody(servers: list[FakeServer], manager: LLMServerManager) -> None:
    servers[0].failure = ServerError("too long")
    with pytest.raises(ServerError, match="too long"):
        await ask(manager, "c")
    assert len(manager.servers) == 2
    assert set(manager._tokens_in_flight.values()) == {0}


class StuckServer(FakeServer):
    """Never answers, whatever it is asked."""

    num_calls = 0

    async def _wait(self, *_: object) -> None:
        self.num_calls += 1
        await asyncio.Event().wait()

    generate = abort = release = suspend = resume = sleep = wake = close = _wait  # type: ignore[assignment]


CALLS: dict[str, tuple[Callable[[LLMServerManager], Awaitable[Any]], str]] = {
    "generate": (
        lambda manager: ask(manager, "c"),
        "conversation 'c' waited 0.01 s for inference replica 0 to answer",
    ),
    "abort": (
        lambda manager: manager.abort("c"),
        "conversation 'c' waited 0.01 s for inference replica 0 to abort its request",
    ),
    "release": (lambda manager: manager.release("c"), "for inference replica 0 to release its cache"),
    "suspend": (
        lambda manager: manager.suspend(),
        "a weight update waited 0.01 s for inference replica 0 to end its requests",
    ),
    "resume": (
        lambda manager: manager.resume(1),
        "a weight update waited 0.01 s for inference replica 0 to admit",
    ),
    "sleep": (
        lambda manager: manager.sleep(["kv_cache"]),
        "the pipeline waited 0.01 s for inference replica 0 to free memory",
    ),
    "wake": (
        lambda manager: manager.wake(["kv_cache"]),
        "the pipeline waited 0.01 s for inference replica 0 to take",
    ),
    "close": (
        lambda manager: manager.close(),
        "the end of the run waited 0.01 s for inference replica 0 to close",
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_every_call_has_a_deadline_that_names_who_waits_for_whom(name: str) -> None:
    call, message = CALLS[name]
    manager = LLMServerManager([StuckServer(0)], request_s=0.01)
    manager._route("c", 1)
    with pytest.raises(DeadlineError, match=re.escape(message)) as caught:
        await call(manager)
    assert "raise deadlines.request_s" in str(caught.value)
    assert set(manager._tokens_in_flight.values()) == {0}


async def test_a_replica_that_does_not_answer_is_not_waited_for_again() -> None:
    server = StuckServer(0)
    manager = LLMServerManager([server], request_s=0.05)
    with pytest.raises(DeadlineError):
        await ask(manager, "c")
    await asyncio.gather(manager.release("c"), manager.close())
    with pytest.raises(ReplicasDeadError, match="the last one failed with DeadlineError"):
        await ask(manager, "c")
    assert server.num_calls == 1


async def test_a_replica_s_own_timeout_is_its_death_and_no_deadline() -> None:
    servers = [FakeServer(0), FakeServer(1)]
    servers[0].failure = TimeoutError("socket")
    assert await ask(LLMServerManager(servers, request_s=5.0), "c") == 1


async def test_updates_reach_every_replica(servers: list[FakeServer], manager: LLMServerManager) -> None:
    await manager.suspend("abort_continue")
    await manager.resume(4)
    await manager.close()
    assert servers[0].calls == servers[1].calls == ["suspend abort", "resume 4", "close"]


class CountingServer(FakeServer):
    """Samples 10, 11, 12, … a token an iteration of the event loop, with the current version, and can be
    suspended."""

    def __init__(self, name: int) -> None:
        super().__init__(name)
        self.version = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.stopped: set[str] = set()

    async def generate(self, prompt_ids, sampling, request_id, media=(), partial_ids=()):  # type: ignore[no-untyped-def]
        self.seen.append((request_id, len(partial_ids)))
        await self.is_open.wait()
        tokens, reason = [], "length"
        for token in range(10 + len(partial_ids), 10 + sampling.max_new_tokens):
            await asyncio.sleep(0)
            if request_id in self.stopped or not self.is_open.is_set():
                reason = "aborted"
                break
            tokens.append(token)
        versions = (VersionRun(self.version, len(tokens)),) if tokens else ()
        return Completion(
            np.array(tokens, np.int64), np.full(len(tokens), -1.0, np.float32), reason, versions
        )

    async def abort(self, request_id: str) -> None:
        self.stopped.add(request_id)

    async def suspend(self, suspension: str = "finish") -> None:
        self.is_open.clear()
        await let_tasks_run()

    async def resume(self, version: int) -> None:
        self.version = version
        self.is_open.set()


async def interrupted(
    how: OnWeightUpdate,
) -> tuple[CountingServer, LLMServerManager, asyncio.Task[Completion]]:
    """A request of 20 tokens that an update interrupts after some turns."""
    server = CountingServer(0)
    manager = LLMServerManager([server])
    task = asyncio.create_task(manager.generate([1], SamplingParams(20), "c"))
    await let_tasks_run()
    await manager.suspend(how)
    return server, manager, task


@pytest.mark.parametrize(
    ("how", "num_updates", "versions"),
    [("abort_continue", 1, [0, 1]), ("abort_continue", 2, [0, 1, 2]), ("abort_restart", 1, [1])],
)
async def test_an_interrupted_response_goes_on_or_starts_over(
    how: OnWeightUpdate, num_updates: int, versions: list[int]
) -> None:
    server, manager, task = await interrupted(how)
    await manager.resume(1)
    if num_updates == 2:
        await let_tasks_run()
        await manager.suspend(how)
        await manager.resume(2)
    completion = await task
    assert completion.token_ids.tolist() == list(range(10, 30)) and len(completion.logprobs) == 20
    assert [run.version for run in completion.versions] == versions and completion.finish_reason == "length"
    has_partial_tokens = [num_partial > 0 for _, num_partial in server.seen]
    assert has_partial_tokens == [False] + [how == "abort_continue"] * num_updates


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_response_that_its_caller_aborts_does_not_go_on(is_late: bool) -> None:
    """Neither in the middle of sampling nor while it waits for new weights."""
    server, manager, task = await interrupted("abort_continue" if is_late else "finish")
    await manager.abort("c")
    await manager.resume(1)
    completion = await task
    assert completion.finish_reason == "aborted" and 0 < len(completion.token_ids) < 20
    assert len(server.seen) == (2 if is_late else 1) and not manager._in_flight


class BreakingServer(FakeServer):
    async def _break(self, _: object) -> None:
        raise ConnectionError("gone")

    resume = release = _break


async def test_a_replica_that_breaks_in_an_update_is_left_and_the_others_go_on() -> None:
    servers = [BreakingServer(0), FakeServer(1)]
    manager = LLMServerManager(servers)
    await manager.suspend()
    await manager.resume(1)
    assert manager.servers == (servers[1],) and await ask(manager, "c") == 1


async def test_a_conversation_leaves_a_replica_with_clearly_more_to_do_and_its_cache_is_released(
    servers: list[FakeServer], manager: LLMServerManager
) -> None:
    slow = servers[0]
    assert [await ask(manager, name) for name in ("a", "b", "c")] == [0, 0, 0]
    slow.gate.clear()
    held = [asyncio.create_task(ask(manager, name, 20)) for name in ("a", "b")]
    await let_tasks_run()
    assert len(slow.seen) == 5, "25 tokens aren't enough more than none, with 25 on top"
    async with asyncio.timeout(60):  # Whoever stays is held.
        assert await ask(manager, "c", 10) == 1
    assert slow.calls == ["release c"]
    slow.gate.set()
    assert await asyncio.gather(*held) == [0, 0]
    assert await ask(manager, "c", 10) == 1, "it stays where its context is now"


async def test_a_replica_that_breaks_while_a_conversation_leaves_it_is_buried() -> None:
    servers = [BreakingServer(0), FakeServer(1)]
    manager = LLMServerManager(servers)
    await ask(manager, "a")
    await ask(manager, "b")
    servers[0].gate.clear()
    held = asyncio.create_task(ask(manager, "a", 100))
    await let_tasks_run()
    assert await ask(manager, "b") == 1
    assert manager.servers == (servers[1],)
    held.cancel()


async def test_a_replica_that_dies_while_a_conversation_moves_to_it_is_left_again(
    servers: list[FakeServer], manager: LLMServerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def release_late(request_id: str) -> None:
        servers[1].failure = ConnectionError("gone")
        servers[0].gate.set()
        assert await ask(manager, "other") == 0 and manager.servers == (servers[0],)

    monkeypatch.setattr(servers[0], "release", release_late)
    assert [await ask(manager, name) for name in ("a", "b")] == [0, 0]
    servers[0].gate.clear()
    held = asyncio.create_task(ask(manager, "a", 100))
    await let_tasks_run()
    assert await ask(manager, "b") == 0 and await held == 0
    assert [name for name, _ in servers[1].seen] == ["other"], "it was dead before b's request"


async def test_a_replica_that_dies_in_the_middle_comes_back_by_joining(
    servers: list[FakeServer], manager: LLMServerManager
) -> None:
    servers[0].gate.clear()
    asked = [asyncio.create_task(ask(manager, name)) for name in ("a", "b")]
    await let_tasks_run()
    servers[0].failure = ConnectionError("gone")
    servers[0].gate.set()
    assert await asyncio.gather(*asked) == [1, 1]
    servers[0].failure = None
    manager.join(servers[0])
    servers[1].gate.clear()
    held = asyncio.create_task(ask(manager, "b", 50))
    await let_tasks_run()
    assert await ask(manager, "new") == 0
    servers[1].gate.set()
    await held
    await manager.suspend()
    assert [server.calls for server in servers] == [["suspend finish"]] * 2, "updates reach it too"


async def test_a_replica_that_leaves_finishes_its_requests_and_gets_no_others(
    servers: list[FakeServer], manager: LLMServerManager
) -> None:
    servers[0].gate.clear()
    held = asyncio.create_task(ask(manager, "a"))
    await let_tasks_run()
    leaving = asyncio.create_task(manager.leave(servers[0]))
    await let_tasks_run()
    assert await ask(manager, "b") == 1 and not leaving.done()
    servers[0].gate.set()
    await leaving
    assert await held == 0
    assert await ask(manager, "a") == 1
    assert manager.servers == (servers[1],)
