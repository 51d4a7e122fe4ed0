"""Ray's cluster passes the contract of clusters, over one Ray with three nodes, which are given as values:
all are its only raylet, and the head has no device. That shows where things are placed, not how machines
talk."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cluster_contract as contract
import pytest
import ray
import torch
from ray.exceptions import ActorUnavailableError, OutOfMemoryError
from toy_envs import BanditEnv

from turnwise.cluster import ray_hosts
from turnwise.cluster.actor_host import ActorHost, Heard
from turnwise.cluster.env_pool import EnvPool, PoolSettings
from turnwise.cluster.ray_actor import ActorWire
from turnwise.cluster.ray_cluster import RayCluster
from turnwise.cluster.ray_hosts import RayHosts, _require_alive
from turnwise.cluster.ray_session import join_ray
from turnwise.cluster.ray_settings import Outage, RaySettings
from turnwise.cluster.wire import Message
from turnwise.errors import EnvironmentFault, WorkerError
from turnwise.protocols import Cluster
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.machine import Machine
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Task

SETTINGS = RaySettings(os.environ.get("RAY_ADDRESS", ""), start_s=600.0)
SIZE = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    [raylet] = join_ray(SETTINGS, num_slots=SIZE).nodes
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == handlers
    sizes = {"head": 0, "first": SIZE // 2, "second": SIZE // 2}
    nodes = [replace(raylet, num_devices=size, name=name) for name, size in sizes.items()]
    with WatchedRunner(Watchdog(grace_s=5.0)) as runner:
        placement = contract.placement_of("ray", SIZE, Machine(tuple(nodes)))
        stopwatch = Stopwatch()
        hosts = RayHosts(placement, SETTINGS, runner.watchdog, stopwatch)
        made = RayCluster(
            runner.run,
            runner.watchdog,
            stopwatch,
            contract.THREADS,
            torch.set_num_threads,
            placement=placement,
            hosts=hosts,
            on_end=hosts.close,
        )
        yield made
        made.shutdown()
    assert not ray.is_initialized()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Cluster], None], cluster: Cluster) -> None:
    check(cluster)


class Located(contract.Worker):
    def located(self) -> tuple[str, str]:
        return self.context.node, self.context.device

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def end(self) -> None:
        print("out of luck", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_knows_its_node(cluster: Cluster) -> None:
    workers = cluster.spawn("actor_train", Located)
    nodes = [workers.at(rank).call("located").result()[0] for rank in range(SIZE)]
    assert nodes == ["first", "first", "second", "second"]


def test_the_stacks_of_a_rank_that_computes_are_shown(cluster: Cluster) -> None:
    workers: Any = cluster.spawn("actor_train", Located)
    call = workers.at(1).call("sleep", 3.0)
    time.sleep(1.0)
    assert "in sleep" in workers.at(1).process.process.life.stacks()
    call.result()


def test_environments_live_in_actors_of_all_nodes_and_are_replaced(cluster: Any) -> None:
    hosts = cluster._hosts
    settings = PoolSettings("Bandit", "BanditEnv", is_blocking=True, start_s=300.0)
    pool = EnvPool(BanditEnv, 2, settings, asyncio.new_event_loop(), hosts)
    hosts.before_close(pool.end)
    pool.begin()
    names = [worker.process.name for worker in pool._workers]
    assert sorted(name.rpartition(" on ")[2] for name in names) == ["first", "second"]
    task = Task("train/Bandit/0", "Bandit", "train", 0)
    envs = [pool.make(task) for _ in range(2)]
    assert [env.reset(seed=0)[0] for env in envs] == ["pull a b c d"] * 2
    assert envs[1].step("b")[1] == 1.0
    pool._workers[0].kill()
    with pytest.raises(EnvironmentFault, match="has ended"):
        for _ in range(100):
            envs[0].reset(seed=0)
            time.sleep(0.1)
    assert pool.make(task).reset(seed=0)[0] == "pull a b c d"
    pool.end()
    assert not +hosts._spread._num_processes, "those that have ended leave room"


def test_a_lost_node_of_which_a_run_awaits_devices_is_named(cluster: Any) -> None:
    """Ray would wait for it for ever."""
    nodes = cluster._hosts.placement.machine.nodes
    _require_alive(nodes)
    with pytest.raises(WorkerError, match="node second was lost"):
        _require_alive([*nodes, replace(nodes[-1], key="of a node that was")])


def test_an_actor_out_of_reach_is_asked_again_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [ActorUnavailableError("it may live", None)] * 3 + [Heard(0, [Message(b"x", [])])]

    class Unavailable(OutOfMemory):
        def remote(self, number: int) -> Any: ...

    def get(_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "wait", lambda futures, timeout: (futures, []))
    monkeypatch.setattr(ray, "get", get)
    wire = ActorWire(Unavailable())
    pauses: list[float] = []
    wire.outage = Outage(pauses.append)
    assert wire.receive().content == b"x"
    assert len(pauses) == 3 and not wire.outage.is_on


class OutOfMemory:
    """An actor that Ray's monitor of memory has ended."""

    @property
    def listen(self) -> OutOfMemory:
        return self

    def options(self, **_: Any) -> OutOfMemory:
        return self

    def remote(self, number: int) -> Any:
        @ray.remote(num_cpus=0)
        def fail() -> None:
            raise OutOfMemoryError("the node runs low on memory")

        return fail.remote()


def test_any_error_of_ray_about_an_actor_is_its_end(cluster: Cluster) -> None:
    """With another error the thread that reads would end, and nobody would learn of the actor's end."""
    wire = ActorWire(OutOfMemory())
    with pytest.raises(EOFError):
        wire.receive()
    assert "low on memory" in wire.cause


def test_nothing_is_started_on_a_lost_node(cluster: Any) -> None:
    """Ray would start it when the node is back."""
    hosts = cluster._hosts
    hosts._lost[1] = "is gone"
    with pytest.raises(WorkerError, match="node first is gone"):
        hosts.start("turnwise.cluster.child", ["one more process"], [0])
    del hosts._lost[1]


class EndsAtOnce(ActorHost):
    def __init__(self, *_: Any) -> None:
        os._exit(7)


def test_an_actor_that_ends_while_it_starts_is_one_sentence(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_hosts, "ActorHost", EndsAtOnce)
    # Ray tells the status, or only that the connection has ended.
    with pytest.raises(WorkerError, match="one more process can't be started on node first: ") as caught:
        cluster._hosts.start("turnwise.cluster.child", ["one more process"], [0])
    assert "\n" not in str(caught.value)


def test_a_rank_that_dies_is_named_with_its_last_words(cluster: Cluster) -> None:
    """The last test: the rank is gone afterwards."""
    workers = cluster.spawn("actor_train", Located)
    with pytest.raises(WorkerError, match=r"(?s)rank 3 on second has ended: .*out of luck"):
        workers.at(3).call("end").result()


if __name__ == "__main__":
    status = pytest.main([__file__, "-q", "--noconftest", "-p", "no:cacheprovider", *sys.argv[1:]])
    print(f"ray: the contract of clusters ended with status {status}")
    raise SystemExit(status)
