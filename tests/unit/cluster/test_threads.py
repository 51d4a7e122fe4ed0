"""The trainer's thread: the event loop turns while it computes, and a call that never returns ends the run by name."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest
import torch

from turnwise.cluster.threads import CpuThreads, ThreadCluster
from turnwise.errors import DeadlineError
from turnwise.event_loop import WatchedRunner
from turnwise.pipelines.build_cluster import set_torch_threads
from turnwise.threads import DaemonThread
from turnwise.watchdog import Watchdog


class Worker:
    """Waits for what only a task on the event loop sets."""

    def __init__(self):
        self.may_go_on = threading.Event()
        self.num_threads = 0

    def wait(self):
        self.may_go_on.wait()
        return threading.current_thread().name

    def count(self):
        torch.ones(2).exp()
        return torch.get_num_threads()

    def fail(self):
        raise ValueError("no")


@pytest.fixture
def runner():
    with WatchedRunner(Watchdog(grace_s=5.0)) as runner:
        yield runner


@pytest.fixture
def cluster(runner):
    before = torch.get_num_threads()
    cluster = ThreadCluster(runner.run, runner.watchdog, CpuThreads(train=2, rollout=3, both=before), set_torch_threads)
    yield cluster
    cluster.shutdown()
    assert torch.get_num_threads() == before


def test_the_loop_turns_until_the_call_is_done(runner, cluster):
    workers = cluster.spawn("actor_train", Worker)

    async def start():
        asyncio.get_running_loop().call_later(0.01, workers.worker.may_go_on.set)

    runner.run(start())
    assert workers.call("wait").result(timeout_s=60.0) == "trainer"


def test_each_side_has_its_own_number_of_threads(cluster):
    assert cluster.spawn("actor_train", Worker).call("count").result() == 2
    assert Worker().count() == 3


def test_errors_come_back(cluster):
    with pytest.raises(ValueError, match="no"):
        cluster.spawn("critic", Worker).call("fail").result()


def test_a_call_without_end_is_named_and_nothing_waits_behind_it(cluster):
    workers = cluster.spawn("actor_train", Worker)
    with pytest.raises(DeadlineError, match=r"the pipeline waited 0.05 s for actor_train.wait; raise deadlines.train_s"):
        workers.call("wait").result(timeout_s=0.05)
    with pytest.raises(DeadlineError, match=r"count can't be called: actor_train.wait is past its deadline"):
        workers.call("count")
    workers.worker.may_go_on.set()


def test_the_interpreter_changes_hands_sooner_while_both_need_it(runner):
    before = sys.getswitchinterval()
    threads = CpuThreads(train=1, rollout=1, both=torch.get_num_threads())
    cluster = ThreadCluster(runner.run, runner.watchdog, threads, set_torch_threads)
    during = sys.getswitchinterval()
    cluster.shutdown()
    assert during < before == sys.getswitchinterval()


def test_the_thread_is_gone_after_shutdown(runner, monkeypatch):
    serve = DaemonThread._serve

    def serve_and_linger(self):
        serve(self)
        time.sleep(0.1)

    monkeypatch.setattr(DaemonThread, "_serve", serve_and_linger)
    threads = CpuThreads(train=1, rollout=1, both=torch.get_num_threads())
    ThreadCluster(runner.run, runner.watchdog, threads, set_torch_threads).shutdown()
    assert "trainer" not in {thread.name for thread in threading.enumerate()}
