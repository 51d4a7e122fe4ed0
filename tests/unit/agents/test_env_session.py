"""Calls of environments that take too long or block, on the event loop and in threads."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from odd_envs import SlowEnv
from scripted_conversation import ScriptedConversation
from toy_envs import BanditEnv

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.env_session import CallSettings
from turnwise.envs.base import Step
from turnwise.errors import DeadlineError, EnvironmentFault
from turnwise.protocols import Env
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import SamplingParams, Task, Trajectory

TASK = Task(id="train/Lake/0", tag="Lake", split="train", seed=7)
LIMIT_S = 0.05


class Stuck(BanditEnv):
    """One of its methods doesn't return until `door` is set."""

    def __init__(self, where: str, wait: Callable[[threading.Event], Any]) -> None:
        super().__init__()
        self.door = threading.Event()
        self.num_closes = 0
        self._where, self._wait = where, wait

    def _come(self, where: str) -> None:
        if where == self._where:
            self._wait(self.door)

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._come("reset")
        return super().reset(seed=seed)

    def step(self, action: str) -> Step:
        self._come("step")
        return super().step(action)

    def state_key(self) -> str:
        self._come("state_key")
        return "here"

    def close(self) -> None:
        self._come("close")
        self.num_closes += 1


def sleep_for_ever(door: threading.Event) -> None:
    while not door.is_set():
        time.sleep(0.01)


def sleep_and_swallow(door: threading.Event) -> None:
    while True:
        try:
            time.sleep(1.0)
        except Exception:
            continue


WAITS = [sleep_for_ever, sleep_and_swallow, threading.Event.wait]


def play(env: Env, num_episodes: int = 1, **calls: Any) -> list[Trajectory | BaseException]:
    """Plays episodes at the same time. Returns each one's trajectory or exception."""
    watchdog = Watchdog(grace_s=5.0)
    settings = {"timeout_s": LIMIT_S, "watchdog": watchdog} | calls
    agent = EnvAgent(
        lambda _: env, EnvAgentSettings(tag="Lake", action_pattern=None, calls=CallSettings(**settings))
    )

    async def episodes() -> list[Any]:
        runs = (
            agent.run(TASK, i, lambda *_, **__: ScriptedConversation("bb"), SamplingParams(8))
            for i in range(num_episodes)
        )
        return await asyncio.gather(*runs, return_exceptions=True)

    with WatchedRunner(watchdog) as runner:
        return [
            result if isinstance(result, BaseException) else result[0] for result in runner.run(episodes())
        ]


@pytest.mark.parametrize(
    ("where", "wait"),
    [
        *(("step", wait) for wait in WAITS),
        *((where, sleep_for_ever) for where in ("reset", "state_key", "close")),
    ],
)
def test_a_call_that_blocks_for_ever_is_named_with_its_stack(where: str, wait: Callable[..., Any]) -> None:
    env = Stuck(where, wait)
    [fault] = play(env)
    assert isinstance(fault, EnvironmentFault)
    first, *stacks = str(fault).splitlines()
    call = "step" if where == "state_key" else where  # the agent asks for the key in the call of step
    assert (
        first
        == f"an episode of Lake waited 0.05 s for Stuck.{call}; raise env_step_timeout_s if that may take "
        f"longer"
    )
    assert "thread MainThread in task" in stacks[0] and any(f"in {where}:" in line for line in stacks)
    assert env.num_closes == (where != "close")


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_coroutine_without_end_is_named(method: str) -> None:
    class Endless(SlowEnv):
        pass

    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    setattr(Endless, method, never)
    [fault] = play(Endless(delay_s=0.0))
    assert isinstance(
        fault, EnvironmentFault
    ) and f"0.05 s for Endless.{method}; raise env_step_timeout_s" in str(fault)
    assert "in never: await asyncio.Event().wait()" in str(fault)


def test_a_coroutine_that_blocks_the_event_loop_is_named() -> None:
    class Rude(SlowEnv):
        async def step(self, action: str) -> Step:
            await asyncio.sleep(0)
            sleep_for_ever(threading.Event())
            return await super().step(action)

    [fault] = play(Rude(delay_s=0.0))
    assert (
        isinstance(fault, EnvironmentFault)
        and "for Rude.step" in str(fault)
        and "in sleep_for_ever" in str(fault)
    )


@pytest.mark.parametrize("calls", [{}, {"max_in_threads": 1}], ids=["on the loop", "in a thread"])
@pytest.mark.parametrize("where", ["reset", "state_key", "step", "close"])
def test_an_environment_that_ends_the_process_fails_its_episode(where: str, calls: dict[str, Any]) -> None:
    [fault] = play(Stuck(where, lambda _: sys.exit(3)), timeout_s=60.0, **calls)
    assert isinstance(fault, EnvironmentFault)
    assert str(fault).startswith(f"Stuck.{where} called sys.exit(3)")


def test_a_timeout_of_the_environment_itself_is_passed_on() -> None:
    class Cut(SlowEnv):
        async def step(self, action: str) -> Step:
            raise TimeoutError("socket timed out")

    [fault] = play(Cut(delay_s=0.0))
    assert isinstance(fault, TimeoutError) and str(fault) == "socket timed out"


def test_a_blocking_environment_lives_in_a_thread_of_its_own() -> None:
    envs = []

    class Here(BanditEnv):
        def __init__(self) -> None:
            super().__init__()
            self.threads = {threading.get_ident()}
            envs.append(self)

        def step(self, action: str) -> Step:
            self.threads.add(threading.get_ident())
            return super().step(action)

        def state_key(self) -> int:
            self.threads.add(threading.get_ident())
            return 5

        def close(self) -> None:
            self.threads.add(threading.get_ident())

    agent = EnvAgent(lambda _: Here(), EnvAgentSettings(tag="Lake", calls=CallSettings(max_in_threads=4)))

    async def episodes() -> None:
        runs = (
            agent.run(TASK, i, lambda *_, **__: ScriptedConversation(["b"]), SamplingParams(8))
            for i in range(3)
        )
        await asyncio.gather(*runs)

    asyncio.run(episodes())
    assert [len(env.threads) for env in envs] == [1, 1, 1]
    assert threading.get_ident() not in set().union(*(env.threads for env in envs))


class Crowd(BanditEnv):
    """Notes how many calls ran at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_running = self.most_running = 0
        self._lock = threading.Lock()

    def step(self, action: str) -> Step:
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        time.sleep(0.005)
        with self._lock:
            self.num_running -= 1
        return super().step(action)


@pytest.mark.parametrize(
    ("calls", "most"), [({"max_in_threads": 3}, 3), ({"max_in_threads": 3, "use_thread_lock": True}, 1)]
)
def test_so_many_blocking_environments_are_called_at_once(calls: dict[str, Any], most: int) -> None:
    env = Crowd()
    results = play(env, num_episodes=12, timeout_s=60.0, **calls)
    assert all(isinstance(result, Trajectory) for result in results)
    assert env.most_running <= most and (most == 1 or env.most_running > 1)


def test_a_thread_that_is_stuck_is_left_behind_and_its_place_given_on() -> None:
    env = Stuck("step", threading.Event.wait)
    results = play(env, num_episodes=4, max_in_threads=1)
    assert all(isinstance(result, EnvironmentFault) for result in results), "each got its turn"
    assert "thread Lake:" in str(results[-1]) or "threads, one of them Lake" in str(results[-1])
    assert env.num_closes == 0
    env.door.set()
    deadline = time.monotonic() + 60.0
    while env.num_closes < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert env.num_closes == 4, "it closes when it comes back"


def test_a_thread_that_is_stuck_keeps_the_lock() -> None:
    env = Stuck("step", threading.Event.wait)
    results = play(env, num_episodes=2, use_thread_lock=True, place_timeout_s=0.2)
    env.door.set()
    assert {type(result) for result in results} == {EnvironmentFault, DeadlineError}
    [fault] = [result for result in results if isinstance(result, DeadlineError)]
    assert "waited 0.2 s for its turn to call Stuck." in str(fault) and "deadlines.env_s" in str(fault)
