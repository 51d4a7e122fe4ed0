"""Roles with ranks in other processes of this machine, one process per device."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from turnwise.cluster.fork_server import prepare_processes
from turnwise.cluster.messages import Command, Network, Parcel, SetUp
from turnwise.cluster.process import WorkerProcess
from turnwise.cluster.rank_process import CallSettings, ConnectedRanks, RankProcess, RunAsync, Started
from turnwise.cluster.ranks import require_rank
from turnwise.errors import WorkerError
from turnwise.protocols import Route
from turnwise.runtime.placement import CpuThreads, Placement, RolePlacement
from turnwise.runtime.rank import Layout, RankContext
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog

RANKS = "turnwise.cluster.child"
"""The module that a process of ranks runs, see `hosts`."""
_OTHERS_S = 5.0  # seconds to wait, after the first rank has failed, for others to fail too
_UNREACHED_S = 60.0  # seconds to wait for the fate of a process that is out of reach
_LOOK_S = 0.5  # seconds between two looks whether a process that is out of reach has ended


@dataclass(frozen=True, slots=True)
class StartedAll:
    """The future result of a call that several ranks run. `join` combines their results, given in the order
    of the ranks."""

    calls: Sequence[Started]
    join: Callable[[list[Any]], Any]

    def result(self) -> Any:
        """Waits for all ranks. Raises DeadlineError past the cluster's deadline; WorkerError if a process has
        ended. If several ranks fail, raises the error of a rank whose process has ended, since this makes
        others fail; else the first error."""
        return self.calls[0].process.wait_for(self.calls[0].name, self)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        failed: list[tuple[Started, BaseException]] = []  # in the order in which they failed

        def note(call: Started, wait: asyncio.Future[Any]) -> None:
            if not wait.cancelled() and (error := wait.exception()) is not None:
                failed.append((call, error))

        waits = [asyncio.create_task(call._awaited(), name=call.name) for call in self.calls]
        for call, wait in zip(self.calls, waits, strict=True):
            wait.add_done_callback(partial(note, call))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            if failed:
                await asyncio.wait(waits, timeout=_OTHERS_S)
                end = time.monotonic() + _UNREACHED_S
                while self._has_missing_cause(waits) and time.monotonic() < end:
                    await asyncio.wait(waits, timeout=_LOOK_S)
                raise next((error for call, error in failed if call.process.is_gone), failed[0][1])
            return self.join([wait.result() for wait in waits])
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _has_missing_cause(self, waits: Sequence[asyncio.Task[Any]]) -> bool:
        """Whether a process has ended, or may have, whose call hasn't failed yet."""
        for call, wait in zip(self.calls, waits, strict=True):
            if not wait.done() and (call.process.is_gone or call.process.is_out_of_reach):
                return True
        return False


class ProcessWorkers:
    """The ranks of a role, each in its own process. Ranks of one replica get the same parcel."""

    def __init__(
        self,
        role: str,
        processes: Sequence[RankProcess],
        layout: Layout,
        parcel: Callable[[Command, int], Parcel],
    ) -> None:
        self.size = len(processes)
        self.dp_size = layout.dp
        self._role = role
        self._processes = processes
        self._layout = layout
        self._parcel = parcel

    def call(
        self, method: str, *args: Any, route: Route = "broadcast", **kwargs: Any
    ) -> Started | StartedAll:
        if route == "rank0" or self.size == 1:
            return self.at(0).call(method, *args, **kwargs)
        name = f"{self._role}.{method}"
        if route == "broadcast":
            parcel = self._parcel(Command("ask", (self._role, method, args, kwargs)), self.size)
            started = [process.start(name, parcel) for process in self._processes]
            return StartedAll(started, itemgetter(self._layout.speaker))
        parcels = [self._share(method, args, kwargs, replica) for replica in range(self.dp_size)]
        calls: list[Started] = []
        for rank, process in enumerate(self._processes):
            replica = self._layout.position(rank).dp
            calls.append(process.start(name, parcels[replica]))
        return StartedAll(calls, self._joined)

    def at(self, rank: int) -> "ProcessRank":
        require_rank(self._role, self.size, rank)
        return ProcessRank(self._role, self._processes[rank])

    def _share(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any],
        replica: int,
    ) -> Parcel:
        """The call of a replica's ranks."""
        shares = tuple(_share(argument, replica, self.dp_size) for argument in args)
        return self._parcel(Command("ask", (self._role, method, shares, kwargs)), self._layout.replica_size)

    def _joined(self, answers: Sequence[Sequence[Any]]) -> list[Any]:
        """The lists of the ranks that answer, in the order of the replicas."""
        joined: list[Any] = []
        for rank, answer in enumerate(answers):
            if self._layout.answers(rank):
                joined += answer
        return joined


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """One rank of a role in its process, as a `protocols.RankCalls`."""

    role: str
    process: RankProcess

    def call(self, method: str, *args: Any, **kwargs: Any) -> Started:
        command = Command("ask", (self.role, method, args, kwargs))
        return self.process.start(f"{self.role}.{method}", Parcel(command))


def _share(items: Sequence[Any], replica: int, size: int) -> Sequence[Any]:
    if len(items) % size:
        raise WorkerError(
            f"{len(items)} batches can't be dealt to {size} ranks: each needs the same number of them"
        )
    each = len(items) // size
    return items[replica * each : (replica + 1) * each]


class ProcessCluster:
    """Spawns each role in the processes of its placement, one per device. A rank's methods run in the order
    of the calls.

    Arguments and results are pickled. The processes' log records are logged in this process, and their
    stopwatches report to `stopwatch`. A call that takes longer than `deadline_s` raises DeadlineError.

    `run_async` waits for a coroutine on the run's event loop. `set_num_threads` sets how many threads torch's
    operators use: until `shutdown` this process uses `num_threads.rollout`, and the spawned processes share
    `num_threads.train`. Each spawned process calls `set_up` before roles are made. Raises WorkerError if the
    processes don't find each other."""

    neighbours: Mapping[str, Any] = MappingProxyType({})
    _process_name = "the trainer's process"
    _folder: TemporaryDirectory[str] | None = None  # where the processes find each other

    def __init__(
        self,
        run_async: RunAsync,
        watchdog: Watchdog,
        stopwatch: Stopwatch,
        num_threads: CpuThreads,
        set_num_threads: Callable[[int], None],
        set_up: Callable[[], object] | None = None,
        deadline_s: float | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.num_threads = num_threads
        self._set_num_threads = set_num_threads
        self.placement = placement or Placement("process")
        self._processes: list[RankProcess] = []
        with ExitStack() as on_error:
            on_error.callback(self._end)
            begin = partial(
                _begin, set_num_threads, max(1, num_threads.train // self.placement.num_processes), set_up
            )
            self._start(CallSettings(run_async, watchdog, stopwatch, deadline_s), begin)
            on_error.pop_all()
        set_num_threads(num_threads.rollout)

    def _start(self, settings: CallSettings, begin: Callable[[], object]) -> None:
        """Starts the processes and connects their ranks."""
        size = self.placement.num_processes
        for rank in range(size):
            forked = WorkerProcess.fork(self._name(rank), RANKS, settings.stopwatch)
            self._processes.append(ConnectedRanks(forked, settings))
        self._set_up(dict(os.environ), begin)
        if size > 1:
            self._folder = TemporaryDirectory(prefix="turnwise-")
            prepare_processes().remove_at_end(self._folder.name)
            self._join(f"{self._folder.name}/rendezvous")

    def _name(self, number: int) -> str:
        is_only = self.placement.num_processes == 1
        return self._process_name if is_only else f"{self._process_name} of rank {number}"

    def _set_up(self, environment: dict[str, str], begin: Callable[[], object]) -> None:
        """Sets up each process, with this environment if it isn't empty."""
        levels = {name: logging.getLogger(name).level for name in ("", "turnwise")}
        set_up = SetUp(environment, list(sys.path), os.getcwd(), levels, begin)
        parcels = [Parcel(Command("set_up", (set_up,)))] * len(self._processes)
        self._send("setting up the trainer's process", parcels)

    def _join(self, rendezvous: Any) -> None:
        """Lets the processes meet, so that they can compute together."""
        size = self.placement.num_processes
        joins = [(rendezvous, rank, size, self._network(rank)) for rank in range(size)]
        self._send("joining the ranks", [Parcel(Command("join", join)) for join in joins])

    def _network(self, number: int) -> Network:
        """How a process reaches the others."""
        device = self.placement.machine.device_name(self.placement.devices[number])
        return Network(device, self.placement.groups)

    def spawn(self, role: str, factory: Callable[[RankContext], Any], *, beside: str = "") -> ProcessWorkers:
        host_role = beside or role
        placed = self.placement.roles.get(host_role, RolePlacement(((0,),), (0,)))
        processes = [self._processes[number] for number in placed.processes]
        parcels: list[Parcel] = []
        for rank in range(placed.size):
            context = replace(self._context(host_role, rank), role=role)
            parcels.append(Parcel(Command("make", (factory, context))))
        self._send(f"making {role}", parcels, processes)
        return ProcessWorkers(role, processes, placed.layout, self._parcel)

    def _context(self, role: str, rank: int) -> RankContext:
        return self.placement.context(role, rank)

    def _parcel(self, command: Command, num_receivers: int) -> Parcel:
        """A command for that many processes."""
        return Parcel(command)

    def _send(self, name: str, parcels: Sequence[Parcel], processes: Sequence[RankProcess] = ()) -> None:
        """Sends each process its command, and waits for all."""
        pairs = zip(processes or self._processes, parcels, strict=True)
        StartedAll([process.start(name, parcel) for process, parcel in pairs], itemgetter(0)).result()

    def try_sending(self, value: Any) -> dict[str, Started]:
        """Sends a value to all processes, to find out early whether it arrives. Returns a call for the name
        of each process. It raises WorkerError if the value can't be pickled, or the error that unpickling it
        raises there."""
        parcel = self._parcel(Command("check_sendable", (value,)), len(self._processes))
        return {process.name: process.start("a trial", parcel) for process in self._processes}

    def keep_first_ranks(self) -> bool:
        firsts = {placed.processes[0] for placed in self.placement.roles.values()} or {0}
        for number, process in enumerate(self._processes):
            if number not in firsts:
                process.kill()
        return all(self._processes[number].is_free_within(_OTHERS_S) for number in firsts)

    def shutdown(self) -> None:
        """Ends the processes without waiting for their running calls."""
        self._set_num_threads(self.num_threads.total)
        self._end()

    def _end(self) -> None:
        with ExitStack() as endings:
            if self._folder is not None:
                endings.callback(self._folder.cleanup)
            for process in self._processes:
                endings.callback(process.end)


def _begin(
    set_num_threads: Callable[[int], None], num_threads: int, set_up: Callable[[], object] | None
) -> None:
    set_num_threads(num_threads)
    if set_up is not None:
        set_up()
