"""Environments in worker processes: their calls, and what becomes of workers that end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import worker_envs
from toy_envs import LettersEnv

from turnwise.cluster import env_worker
from turnwise.cluster.env_pool import EnvPool, PoolSettings, RemoteEnv
from turnwise.cluster.hosts import ForkedHosts, Hosts
from turnwise.cluster.messages import joined, pack, parted, unpack
from turnwise.cluster.process import WorkerProcess
from turnwise.errors import ConfigError, EnvironmentFault, EnvWorkersDeadError
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.placement import Placement
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Task

TASK = Task(id="train/Home/0", tag="Home", split="train", seed=3)


@pytest.fixture
def runner() -> Iterator[WatchedRunner]:
    with WatchedRunner(Watchdog()) as made:
        made.watchdog.start()
        yield made


def pool_of(
    runner: WatchedRunner,
    make_env: Callable[..., Any],
    num_workers: int = 1,
    hosts: Hosts | None = None,
    **settings: Any,
) -> EnvPool:
    pool = EnvPool(
        make_env,
        num_workers,
        PoolSettings("Home", "HomeEnv", watchdog=runner.watchdog, **settings),
        runner.loop,
        hosts,
    )
    runner.at_close(pool.end)
    pool.begin()
    return pool


async def result_of(result: Any) -> Any:
    """The result of a call that may be a coroutine."""
    return await result if isinstance(result, Awaitable) else result


async def opened(pool: EnvPool, renders: bool = False) -> RemoteEnv:
    env: RemoteEnv = await result_of(pool.make(TASK, renders))
    return env


@pytest.mark.parametrize("is_blocking", [False, True])
def test_an_episode_is_that_of_the_environment_here(runner: WatchedRunner, is_blocking: bool) -> None:
    pool = pool_of(runner, worker_envs.HomeEnv, is_blocking=is_blocking)
    local = worker_envs.HomeEnv()

    async def episode() -> None:
        env = await opened(pool)
        assert (env.class_name, env.has_state_key) == ("HomeEnv", True)
        assert env.metric_reductions == LettersEnv.metric_reductions
        assert await result_of(env.reset(seed=3)) == local.reset(seed=3)
        for action in ("ab", "cD"):
            key = local.state_key()
            assert await result_of(env.step(action)) == local.step(action)
            assert env.last_state_key == key
        assert int(await result_of(env.expert_action())) != os.getpid()
        await result_of(env.close())

    runner.run(episode())


def test_calls_of_one_tick_are_one_message_and_environments_are_spread(
    runner: WatchedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[list[str]] = []

    def noted(calls: Any) -> Any:
        messages.append([call.method for call in calls])
        return pack(calls)

    pool = pool_of(runner, worker_envs.HomeEnv, num_workers=2)
    monkeypatch.setattr(env_worker, "pack", noted)

    async def episodes() -> set[str]:
        envs = await asyncio.gather(*(opened(pool) for _ in range(6)))
        await asyncio.gather(*(env.reset(seed=1) for env in envs))
        homes = await asyncio.gather(*(env.expert_action() for env in envs))
        await asyncio.gather(*(env.close() for env in envs))
        return set(homes)

    assert len(runner.run(episodes())) == 2
    assert messages == [[method] * 3 for method in ("make", "reset", "ask", "close") for _ in range(2)]


def test_pictures_and_renderings_come_along(runner: WatchedRunner) -> None:
    pool = pool_of(runner, worker_envs.PictureEnv)

    async def episode() -> None:
        env = await opened(pool, renders=True)
        observation, _ = await env.reset(seed=7)
        assert observation.media[0].data.shape == (256, 256, 3) and (observation.media[0].data == 7).all()
        assert env.render() == "turn 0"
        await env.step("a")
        assert env.render() == "turn 1"

    runner.run(episode())


def test_coroutines_of_an_environment_share_an_event_loop(runner: WatchedRunner) -> None:
    pool = pool_of(runner, worker_envs.AwaitedEnv)

    async def episode() -> Any:
        env = await opened(pool)
        await env.reset(seed=1)
        await env.step("ab")
        return await env.step("ab")

    assert runner.run(episode())[1:3] == (1.0, True)


@pytest.mark.parametrize(
    ("exits", "error", "message"),
    [(False, ValueError, "no step for a"), (True, EnvironmentFault, r"RaisingStepEnv.step called sys.exit")],
)
def test_an_exception_arrives_with_the_traceback_of_the_worker(
    runner: WatchedRunner, exits: bool, error: type[Exception], message: str
) -> None:
    pool = pool_of(runner, partial(worker_envs.RaisingStepEnv, exits=exits))

    async def episode() -> None:
        env = await opened(pool)
        await env.reset(seed=1)
        await env.step("a")

    with pytest.raises(error, match=message) as caught:
        runner.run(episode())
    assert "worker_envs.py" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_worker_that_ends_fails_its_episodes_and_is_started_again(
    runner: WatchedRunner, tmp_path: Path, is_blocking: bool
) -> None:
    pool = pool_of(runner, partial(worker_envs.EndingEnv, str(tmp_path / "ended")), is_blocking=is_blocking)

    async def episode() -> Any:
        env = await opened(pool)
        try:
            await result_of(env.reset(seed=1))
            return await result_of(env.step("ab"))
        finally:
            await result_of(env.close())

    with pytest.raises(EnvironmentFault, match=r"SIGABRT.*1 environment in it.*1 × step"):
        runner.run(episode())
    assert runner.run(episode())[1] == 1.0


def test_a_worker_that_has_ended_is_released_before_another_is_placed(runner: WatchedRunner) -> None:
    """Its node counts it until then."""
    events: list[str] = []

    class Nodes(ForkedHosts):
        def start_beside(self, module: str, name: str) -> WorkerProcess:
            events.append("start")
            process = super().start_beside(module, name)
            release = process.life.release

            def noted() -> None:
                events.append("release")
                release()

            process.life.release = noted  # type: ignore[method-assign]
            return process

    hosts = Nodes(Placement("local"), Stopwatch())
    pool = pool_of(runner, worker_envs.EndingEnv, hosts=hosts)

    async def episode() -> None:
        env = await opened(pool)
        await env.reset(seed=1)
        await env.step("ab")

    with pytest.raises(EnvironmentFault, match="played elsewhere"):
        runner.run(episode())
    assert events == ["start", "release", "start"]


def test_a_class_that_ends_its_worker_again_and_again_ends_the_run(runner: WatchedRunner) -> None:
    pool = pool_of(runner, worker_envs.EndingEnv, num_workers=2)

    async def episode() -> None:
        env = await opened(pool)
        await env.reset(seed=1)
        await env.step("ab")

    for _ in range(2):
        with pytest.raises(EnvironmentFault, match="played elsewhere"):
            runner.run(episode())
    for _ in range(2):
        with pytest.raises(EnvWorkersDeadError, match=r"HomeEnv.*SIGABRT"):
            runner.run(episode())


def test_a_call_in_c_that_was_given_up_costs_the_worker(runner: WatchedRunner) -> None:
    pool = pool_of(runner, worker_envs.StuckInCEnv, stuck_s=0.1)

    async def episode() -> None:
        stuck = await opened(pool)
        await stuck.reset(seed=1)
        step = asyncio.ensure_future(stuck.step("a"))
        await asyncio.sleep(0.05)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        assert stuck.close() is None
        other = await opened(pool)
        while True:  # until the worker is killed
            await other.reset(seed=1)
            await asyncio.sleep(0.02)

    with pytest.raises(EnvironmentFault, match=r"ended: something killed it"):
        runner.run(episode())


def test_a_python_loop_that_was_given_up_is_interrupted_and_its_environment_closed(
    runner: WatchedRunner,
) -> None:
    pool = pool_of(runner, SpinningEnv, stuck_s=60.0)

    async def episode() -> None:
        env = await opened(pool)
        await env.reset(seed=1)
        step = asyncio.ensure_future(env.step("a"))
        await asyncio.sleep(0.2)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        [worker] = pool._workers
        while worker.env_ids:
            await asyncio.sleep(0.02)

    runner.run(episode())


class SpinningEnv(LettersEnv):
    def step(self, action: str) -> Any:
        while True:
            time.sleep(0)


class UnsendableEnv(LettersEnv):
    def __init__(self, lock: Any) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("make_env", "message"),
    [
        (partial(UnsendableEnv, lock=threading.Lock()), "can't be sent"),
        (worker_envs.LooseEnv, r"reset returned.*can't be sent"),
    ],
)
def test_what_cannot_be_sent_is_told_at_the_start(
    runner: WatchedRunner, make_env: Callable[..., Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"custom_envs\.Home.*{message}.*max_env_num_per_worker"):
        pool_of(runner, make_env)


def test_what_cannot_be_imported_there_is_told_at_the_start(
    runner: WatchedRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "only_here.py"
    module.write_text("from toy_envs import LettersEnv\nclass HereEnv(LettersEnv): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    module.unlink()
    with pytest.raises(ConfigError, match=r"custom_envs\.Home.*only_here"):
        pool_of(runner, only_here.HereEnv)


def test_joined_messages_come_apart_with_their_buffers() -> None:
    arrays = [np.arange(20_000, dtype=np.int64) + number for number in range(3)]
    messages = [pack((number, array)) for number, array in enumerate(arrays)]
    messages.insert(1, pack("small"))
    first, small, *others = [unpack(part) for part in parted(joined(messages))]
    assert small == "small"
    assert [number for number, _ in (first, *others)] == [0, 1, 2]
    for (_, array), sent in zip((first, *others), arrays, strict=True):
        assert (array == sent).all()
