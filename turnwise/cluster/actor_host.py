"""What an actor of Ray is: a process that hosts workers, and its end of the wire to the run. This module
imports neither ray nor torch, so that the devices are chosen before torch is imported."""

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from turnwise.cluster.beats import Looking, ProcessKey
from turnwise.cluster.wire import Message

LISTEN_S = 5.0
"""Seconds after which `listen` answers without a message."""


class Heard(NamedTuple):
    """What `listen` answers."""

    num_delivered: int
    """Number of messages that have arrived, without a gap."""
    messages: list[Message]


class HostedWire:
    """The actor's end of a wire. The run calls `deliver` and `listen`; what the actor hosts calls `receive`
    and `send`. Messages are numbered in both directions, so each call of the run may be repeated."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._early: dict[int, Message] = {}
        """Messages that have arrived before one with a smaller number."""
        self._delivered: deque[Message] = deque()
        self._num_delivered = 0
        self._sent: deque[Message] = deque()
        self._num_heard = 0
        self._is_closed = False

    def deliver(self, number: int, message: Message) -> None:
        """Passes on a message of the run. One that has come before is dropped."""
        with self._changed:
            if number >= self._num_delivered:
                self._early[number] = message
            while self._num_delivered in self._early:
                self._delivered.append(self._early.pop(self._num_delivered))
                self._num_delivered += 1
            self._changed.notify_all()

    def listen(self, number: int) -> Heard:
        """The messages for the run from `number` on. Waits for one, at most `LISTEN_S` seconds. Forgets
        earlier messages, which have arrived."""
        with self._changed:
            while self._num_heard < number:
                self._sent.popleft()
                self._num_heard += 1
            self._changed.wait_for(lambda: self._sent, LISTEN_S)
            return Heard(self._num_delivered, list(self._sent))

    def receive(self) -> Message:
        with self._changed:
            self._changed.wait_for(lambda: self._delivered or self._is_closed)
            if self._is_closed:
                raise EOFError
            return self._delivered.popleft()

    def send(self, message: Message) -> None:
        # It is read later, in another thread.
        own = message.copied()
        with self._changed:
            self._sent.append(own)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class HostFacts(NamedTuple):
    """Where a host is, and where its node finds what it writes."""

    process: ProcessKey
    stacks: str
    """Path of the file that SIGUSR1 writes stacks into."""
    stderr: str
    """Path of the file that has its standard error."""


class ActorHost:
    """Hosts workers in this process, which has just started. `environment` replaces variables of this
    process; None removes one. It ends when `agent`, a process of this node, has ended."""

    def __init__(self, environment: Mapping[str, str | None], agent: ProcessKey) -> None:
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._wire = HostedWire()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 open as long as the process lives
        # A process that is blocked in C answers signals of this kind too.
        faulthandler.register(signal.SIGUSR1, file=self._stacks)
        self._agent = agent
        Looking("agent watch", self._look)

    def serve(self, module: str) -> None:
        """Calls the function `answer_all` of a module with this end of the wire. If it fails, the process
        ends: nobody else would answer the run."""
        try:
            main: Any = import_module(module)
            main.answer_all(self._wire)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def deliver(self, number: int, message: Message) -> None:
        self._wire.deliver(number, message)

    def listen(self, number: int) -> Heard:
        return self._wire.listen(number)

    def facts(self) -> HostFacts:
        process = ProcessKey.of_this()
        descriptors = f"/proc/{process.number}/fd"
        stacks = f"{descriptors}/{self._stacks.fileno()}"
        return HostFacts(process, stacks, os.path.realpath(f"{descriptors}/2"))

    def _look(self) -> None:
        if self._agent.state() == "ended":
            os._exit(1)
