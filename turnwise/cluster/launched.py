"""Ranks in processes that a launcher has started (torchrun, accelerate): the first drives the run, the others
serve it."""

import faulthandler
import os
import platform
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Client, Connection
from queue import SimpleQueue
from socket import create_server
from typing import Any

import torch
import torch.distributed as dist

from turnwise import __version__
from turnwise.cluster.channel import Channel
from turnwise.cluster.child import RoleWorkers, answer_all
from turnwise.cluster.greeting import greetings
from turnwise.cluster.messages import Command, Parcel, SetUp
from turnwise.cluster.process import WorkerProcess
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.cluster.process_life import LaunchedLife
from turnwise.cluster.rank_process import CallSettings, ConnectedRanks, RankProcess
from turnwise.cluster.wire import ConnectionWire, Message
from turnwise.errors import WorkerError
from turnwise.runtime.machine import gloo_interface, own_address
from turnwise.runtime.rank import RankContext, launched, launched_nodes
from turnwise.runtime.torch_group import form_groups, join_processes

_LOOPBACK = "127.0.0.1"
_GREETING_S = 600.0
"""Seconds in which the other processes connect to the first one. They have all joined by then, so they are
fast."""


class OwnRanks(RankProcess, RoleWorkers):
    """The ranks in this process. Their calls run in a thread, so the event loop runs while they wait for
    other ranks."""

    def __init__(self, name: str, settings: CallSettings) -> None:
        RankProcess.__init__(self, name, settings)
        RoleWorkers.__init__(self, settings.stopwatch)

    def _ask(self, name: str, parcel: Parcel) -> Any:
        command = parcel.command
        return getattr(self, command.method)(*command.args)

    def begin(self, begin: Callable[[], object]) -> None:
        """Calls the function `begin` in this rank's thread, to set up the thread."""
        begin()

    def make(self, factory: Callable[[RankContext], Any], context: RankContext) -> None:
        if context.device.startswith("cuda"):
            torch.cuda.set_device(context.device)  # for this thread
        super().make(factory, context)

    def _stacks(self) -> str:
        return "it is this process, whose stacks are above"

    def _end(self) -> None:
        self._thread.end()
        self.workers.clear()


class LaunchedCluster(ProcessCluster):
    """The cluster in the first of the launched processes; the others call `serve_launched`. Raises
    WorkerError if the others don't join or have other versions of the libraries, or if this process has made
    such a cluster before."""

    _has_run = False

    def _start(self, settings: CallSettings, begin: Callable[[], object]) -> None:
        size = self.placement.num_processes
        if LaunchedCluster._has_run:
            raise WorkerError(
                "the launched processes ended with the first run of this script; start it again for "
                "another run"
            )
        LaunchedCluster._has_run = True
        address, interface = _own_place()
        device = self.placement.machine.device_name(self.placement.devices[0])
        join_processes(None, 0, size, device, interface)
        key = secrets.token_bytes(32)
        with create_server((address, 0), backlog=size) as server:
            dist.broadcast_object_list([server.getsockname(), key, self.placement.groups], src=0)
            form_groups(self.placement.groups)
            connections = dict(
                _checked(*greeting) for greeting in greetings(server, key, size - 1, _GREETING_S)
            )
        self._processes.append(OwnRanks("rank 0", settings))
        for rank in range(1, size):
            connection, process_id, host = connections[rank]
            channel = Channel(ConnectionWire(connection), settings.stopwatch)
            name = f"the launched process of rank {rank}"
            if host:
                name += f" on {host}"
            process = WorkerProcess(name, LaunchedLife(process_id, host), channel)
            self._processes.append(ConnectedRanks(process, settings))
        set_up = SetUp({}, list(sys.path), os.getcwd(), {}, begin)
        set_ups = [Parcel(Command("set_up", (set_up,)))] * (size - 1)
        self._send("setting up the ranks", [Parcel(Command("begin", (begin,))), *set_ups])

    def _end(self) -> None:
        super()._end()
        if dist.is_initialized():
            dist.destroy_process_group()


def serve_launched() -> None:
    """Serves the first launched process until its run ends. If a call still runs here by then, this process
    exits."""
    rank, size = launched()
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', rank)}"
    own_ip, interface = _own_place()
    join_processes(None, rank, size, device, interface)
    meeting: list[Any] = [None, None, None]
    dist.broadcast_object_list(meeting, src=0)
    address, key, groups = meeting
    form_groups(groups)
    connection = Client(tuple(address), authkey=key)
    host = "" if own_ip in (_LOOPBACK, address[0]) else f"{platform.node()} ({own_ip})"
    connection.send((rank, os.getpid(), host, _versions()))
    # The first process acts on signals for the whole run; its end ends this process.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(signal.Signals[name], lambda *_: None)
    answer_all(_ReadAhead(connection))


class _ReadAhead(ConnectionWire):
    """Reads messages in a thread. If the other end is closed in the middle of a call, ends the process."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        self._is_busy = False
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def receive(self) -> Message:
        self._is_busy = False
        message = self._messages.get()
        if message is None:
            raise EOFError
        self._is_busy = True
        return message

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(super().receive())
        except (EOFError, OSError):
            if self._is_busy:
                os._exit(1)
            self._messages.put(None)


def _own_place() -> tuple[str, str]:
    """The address of this machine to which the launcher's other processes may connect, and the network
    interface that has it; loopback and "" if all of them are here."""
    if launched_nodes() == 1:
        return _LOOPBACK, ""
    address = own_address(os.environ["MASTER_ADDR"])
    return address, gloo_interface(address, "GLOO_SOCKET_IFNAME on each machine")


def _checked(
    connection: Connection, greeting: tuple[int, int, str, dict[str, str]]
) -> tuple[int, tuple[Connection, int, str]]:
    rank, process_id, host, versions = greeting
    for name, ours in _versions().items():
        if versions.get(name) != ours:
            raise WorkerError(
                f"rank {rank} has {name} {versions.get(name)}, and rank 0 {ours}; start all processes with "
                "the same Python"
            )
    return rank, (connection, process_id, host)


def _versions() -> dict[str, str]:
    """Versions that must be equal in all processes, since functions are sent as code. turnwise needn't be
    installed."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"turnwise": __version__, "Python": platform.python_version(), **libraries}
