"""Signs of life: who counts as lost, after how much silence, and who doesn't."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from turnwise.cluster import beats
from turnwise.cluster.beats import BEAT_S, DriverWatch, Heartbeat, Looking, NodeMonitor, ProcessKey
from turnwise.cluster.node_agent import NodeAgent, WatchSettings

NODE_S = 30.0


class Clock:
    """Time that tests move."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


class Node:
    """Answers what it is told to, or nothing."""

    def __init__(self, answer="runs"):
        self.answer = answer
        self.num_asked = 0

    def ask(self):
        self.num_asked += 1
        call = Future()
        if isinstance(self.answer, Exception):
            call.set_exception(self.answer)
        elif self.answer:
            call.set_result(self.answer)
        return call


class ActorUnavailableError(Exception):
    """Named as Ray's."""


@pytest.fixture
def clock():
    return Clock()


def looks(watcher, clock, seconds):
    for _ in range(int(seconds)):
        clock.seconds += 1
        watcher.look()


def monitored(clock, node_s=NODE_S, **nodes):
    lost = []
    heartbeats = {name: Heartbeat(node.ask, node_s, clock) for name, node in nodes.items()}
    return NodeMonitor(heartbeats, node_s, lambda name, reason: lost.append((name, reason))), lost


def watched(clock, node, stopped_s=100.0, node_s=NODE_S):
    ends = []
    warnings = []
    heartbeat = Heartbeat(node.ask, node_s, clock)
    return DriverWatch(heartbeat, node_s, stopped_s, ends.append, warnings.append), ends, warnings


def test_a_node_that_answers_stays(clock):
    node = Node()
    monitor, lost = monitored(clock, first=node)
    looks(monitor, clock, 600)
    assert not lost
    assert node.num_asked == pytest.approx(600 / BEAT_S, abs=2)


@pytest.mark.parametrize("node_s", [1.5, 3.0, 5.0, 6.0])
def test_little_patience_makes_no_node_silent_that_answers(clock, node_s):
    monitor, lost = monitored(clock, node_s, first=Node())
    looks(monitor, clock, 60)
    assert not lost
    watch, ends, _ = watched(clock, Node(), node_s=node_s)
    looks(watch, clock, 60)
    assert not ends


def test_a_silent_node_is_lost_once_after_its_time_and_named(clock):
    silent = Node()
    monitor, lost = monitored(clock, first=Node(), second=silent)
    looks(monitor, clock, 60)
    silent.answer = None
    looks(monitor, clock, NODE_S - BEAT_S - 2)
    assert not lost
    looks(monitor, clock, BEAT_S + 2)
    [(name, reason)] = lost
    assert name == "second"
    assert "deadlines.node_s: 30" in reason
    looks(monitor, clock, 600)
    assert len(lost) == 1


def test_a_call_that_may_have_been_executed_is_no_end(clock):
    node = Node(ActorUnavailableError())
    monitor, lost = monitored(clock, first=node)
    looks(monitor, clock, NODE_S - BEAT_S - 2)
    assert not lost
    node.answer = "runs"
    looks(monitor, clock, 600)
    assert not lost


def test_an_agent_that_has_ended_is_an_end_at_once(clock):
    node = Node()
    monitor, lost = monitored(clock, first=node)
    looks(monitor, clock, 20)
    node.answer = RuntimeError("the actor died")
    looks(monitor, clock, BEAT_S + 2)
    assert [name for name, _ in lost] == ["first"]


def test_who_stood_still_itself_calls_nobody_silent(clock):
    node = Node(answer=None)
    monitor, lost = monitored(clock, first=node)
    looks(monitor, clock, 10)
    clock.seconds += 3600
    looks(monitor, clock, 10)
    assert not lost


def test_actors_end_with_the_run(clock):
    driver = Node()
    watch, ends, _ = watched(clock, driver)
    looks(watch, clock, 600)
    assert not ends
    driver.answer = "ended"
    looks(watch, clock, BEAT_S + 2)
    assert ends


def test_actors_end_if_the_node_of_the_run_is_silent(clock):
    driver = Node()
    watch, ends, _ = watched(clock, driver)
    looks(watch, clock, 10)
    driver.answer = None
    looks(watch, clock, NODE_S - BEAT_S - 2)
    assert not ends
    looks(watch, clock, BEAT_S + 2)
    assert ends


def test_a_run_that_stands_still_is_a_warning_until_its_deadline(clock):
    driver = Node("stopped")
    watch, ends, warnings = watched(clock, driver)
    looks(watch, clock, 90)
    assert len(warnings) == 1 and not ends
    driver.answer = "runs"
    looks(watch, clock, 90)
    driver.answer = "stopped"
    looks(watch, clock, 90)
    assert len(warnings) == 2 and not ends
    looks(watch, clock, 20)
    assert ends


def test_without_a_deadline_a_run_may_stand_still_for_ever(clock):
    watch, ends, warnings = watched(clock, Node("stopped"), stopped_s=None)
    looks(watch, clock, 10_000)
    assert len(warnings) == 1 and not ends


@pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc")
def test_the_state_of_a_process_is_known():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        key = ProcessKey.of_this()
        assert key.number == os.getpid() and key.state() == "runs"
        later = ProcessKey(child.pid, "0")
        assert later.state() == "ended", "the number belongs to another process"
        key = ProcessKey(child.pid, _start_of(child.pid))
        assert key.state() == "runs"
        child.send_signal(signal.SIGSTOP)
        _wait_for(lambda: key.state() == "stopped")
    finally:
        child.kill()
    _wait_for(lambda: key.state() == "ended")
    child.wait()
    assert key.state() == "ended"


def _start_of(number):
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]


def _wait_for(condition):
    while not condition():
        time.sleep(0.01)


def test_an_agent_ends_the_processes_of_its_node_and_itself():
    """In a process, since it ends that."""
    code = (
        "import os, subprocess, sys, time\n"
        "from turnwise.cluster import node_agent\n"
        "from turnwise.cluster.beats import ProcessKey\n"
        "from turnwise.cluster.node_agent import NodeAgent, WatchSettings\n"
        "host = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "agent = NodeAgent(WatchSettings(ProcessKey.of_this(), 30.0, None))\n"
        "started = open(f'/proc/{host.pid}/stat').read().rpartition(')')[2].split()[19]\n"
        "agent.add_host(ProcessKey(host.pid, started))\n"
        "print(host.pid, started, flush=True)\n"
        "agent._driver = ProcessKey(2**22 + 1, '0')\n"
        "time.sleep(60)\n"
    )
    agent = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=dict(os.environ)
    )
    assert agent.returncode == 1, agent.stderr
    assert "has ended" in agent.stderr
    number, started = agent.stdout.split()
    _wait_for(lambda: ProcessKey(int(number), started).state() == "ended")


def test_an_agent_says_how_the_run_is():
    settings = WatchSettings(ProcessKey.of_this(), NODE_S, None)
    agent = NodeAgent(settings)
    assert agent.driver_state() == "runs"
    assert agent.beat() is None


def test_looks_end():
    looked = []
    looking = Looking("test", lambda: looked.append(1))
    looking.end()
    assert not looked


def test_looks_go_on_after_an_error_which_is_logged_once_in_a_row(monkeypatch, caplog):
    monkeypatch.setattr(beats, "LOOK_S", 0.001)
    answers = iter([True, False, False, True, False, True])
    is_over = threading.Event()

    def look():
        answer = next(answers, None)
        if answer is None:
            is_over.set()
        elif not answer:
            raise RuntimeError("Ray is gone")

    looking = Looking("node beats", look)
    assert is_over.wait(60)
    looking.end()
    assert [record.threadName for record in caplog.records] == ["node beats"] * 2
    assert all("Ray is gone" in record.exc_text for record in caplog.records)
