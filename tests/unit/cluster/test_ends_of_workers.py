"""What the ends of environment workers mean for a run whose processes are started by its hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import worker_envs

from turnwise.cluster.channel import Channel
from turnwise.cluster.env_pool import MAX_ENDS, EnvPool, PoolSettings
from turnwise.cluster.hosts import ForkedHosts
from turnwise.cluster.process import WorkerProcess
from turnwise.cluster.process_life import ForkedLife
from turnwise.cluster.wire import ConnectionWire
from turnwise.errors import EnvironmentFault, EnvWorkersDeadError
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.placement import Placement
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Task

TASK = Task(id="train/Home/0", tag="Home", split="train", seed=3)


class LostLife(ForkedLife):
    """Ends with its node, whatever ends it."""

    @property
    def has_lost_node(self) -> bool:
        return True


class FailingHosts(ForkedHosts):
    """Starts one process, and then none."""

    num_started = 0

    def start_beside(self, module: str, name: str) -> WorkerProcess:
        self.num_started += 1
        if self.num_started > 1:
            raise OSError("too many open files")
        return super().start_beside(module, name)


class LosingHosts(ForkedHosts):
    """Loses the node of each process that ends."""

    def start_beside(self, module: str, name: str) -> WorkerProcess:
        life = LostLife(f"{module}:serve")
        return WorkerProcess(name, life, Channel(ConnectionWire(life.connection), self._stopwatch))


@pytest.fixture
def runner() -> Iterator[WatchedRunner]:
    with WatchedRunner(Watchdog()) as made:
        made.watchdog.start()
        yield made


def play(runner: WatchedRunner, kind: type[ForkedHosts]) -> Any:
    """Begins workers of an environment that ends them, and returns a function that plays an episode."""
    settings = PoolSettings("Home", "EndingEnv", watchdog=runner.watchdog)
    hosts = kind(Placement("process"), Stopwatch())
    pool = EnvPool(worker_envs.EndingEnv, 1, settings, runner.loop, hosts)
    runner.at_close(pool.end)
    pool.begin()

    async def episode() -> None:
        env = await pool.make(TASK)
        await env.reset(seed=1)
        # Without an answer the episode's own deadline would come.
        async with runner.watchdog.waiting("an episode", "its step", 20.0, "env_step_timeout_s"):
            await env.step("ab")

    return lambda: runner.run(episode())


def test_a_worker_that_can_not_be_started_again_ends_the_run(runner: WatchedRunner) -> None:
    episode = play(runner, FailingHosts)
    for _ in range(2):
        with pytest.raises(EnvWorkersDeadError, match="can't be started again: too many open files"):
            episode()


def test_workers_that_end_with_their_node_say_nothing_about_the_class(runner: WatchedRunner) -> None:
    episode = play(runner, LosingHosts)
    for _ in range(MAX_ENDS + 1):
        with pytest.raises(EnvironmentFault, match="played elsewhere"):
            episode()
