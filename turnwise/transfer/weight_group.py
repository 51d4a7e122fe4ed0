"""A process group by which weights travel, with waits that somebody else can end."""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from turnwise.errors import LostWeightsError, WorkerError
from turnwise.runtime.machine import address_of
from turnwise.runtime.torch_group import Meeting
from turnwise.transfer.buckets import buckets_of
from turnwise.transfer.manifest import WeightManifest

_SETTING = "cluster.interface"
_GIVEN_UP = "given up"  # key of a group's store: why somebody never comes
_CONNECT = timedelta(seconds=30)  # time to connect to a process that is there
_POLL_S = 0.02
_LOOK = timedelta(seconds=0.5)  # between looks whether a transfer is given up
_SHORT_POLL_S = 0.0005
_IN_FLIGHT = 2  # buckets on their way at once
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"  # read as a group is made


class _GivenUpError(Exception):
    """Somebody has given a group up, and says why."""


class WeightGroup:
    """A group of its own, beside torch's default group: of gloo between CPUs, or of NCCL between GPUs. The
    sender opens it and is its rank 0; the others reach it at `meeting`. Each member sends and receives on its
    `device`. With a `name`, members may be those of a process group of torch's that has this name
    (`new_group`). Errors of gloo and NCCL are raised as WorkerError."""

    def __init__(
        self,
        meeting: Meeting,
        store: dist.TCPStore,
        host: str,
        timeout_s: float,
        device: str | torch.device = "cpu",
        name: str = "",
    ) -> None:
        self.meeting = meeting
        self._store = store
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._device = torch.device(device)
        self._name = name
        self._rank = 0
        self._size = 1
        self._group: Any = None

    @classmethod
    def open(
        cls,
        host: str,
        timeout_s: float,
        interface: str = "",
        device: str | torch.device = "cpu",
        name: str = "",
    ) -> "WeightGroup":
        """A group whose members meet at a free port of this node. They reach the node at the address of its
        network `interface`, or at `host` if that is empty. Raises ConfigError if there is no such
        interface."""
        if interface:
            host = address_of(interface, _SETTING)
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        meeting = Meeting(host, store.port, interface)
        return cls(meeting, store, host, timeout_s, device, name)

    @classmethod
    def find(
        cls,
        meeting: Meeting,
        timeout_s: float,
        device: str | torch.device = "cpu",
        name: str = "",
    ) -> "WeightGroup":
        """The group that another process has opened. Raises WorkerError if it can't be reached, and
        ConfigError if this node lacks the group's network interface."""
        timeout = timedelta(seconds=timeout_s)
        own_host = address_of(meeting.interface, _SETTING) if meeting.interface else ""
        try:
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
            own_host = own_host or _own_address(meeting)
        except (RuntimeError, OSError) as error:
            raise WorkerError(
                f"the weights can't be had from {meeting.host}:{meeting.port}: {error}; {_SETTING} "
                "names the network by which the nodes reach each other"
            ) from error
        return cls(meeting, store, own_host, timeout_s, device, name)

    @classmethod
    def give_up(cls, meeting: Meeting, reason: str) -> None:
        """Ends the waits of those that have come to a meeting, in whatever process: somebody else never
        comes."""
        with suppress(OSError, RuntimeError):  # nobody waits there any more
            # The store's own attempts to connect last for minutes.
            socket.create_connection((meeting.host, meeting.port), _CONNECT.total_seconds()).close()
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=_CONNECT)
            store.set(_GIVEN_UP, reason)

    def join(self, rank: int, size: int) -> None:
        """Waits until all `size` members have come. Raises LostWeightsError if somebody gives that up,
        WorkerError if it takes too long."""
        self.gather([rank], size)
        self._rank = rank
        self._size = size
        try:
            self._group = self._connected(rank, size)
            if self._device.type == "cuda":
                self._await_connection()
        except RuntimeError as error:
            raise WorkerError(
                f"member {rank} of {size} could not join those who send and receive weights: {error}"
            ) from error

    def _connected(self, rank: int, size: int) -> Any:
        store: dist.Store = self._store
        if self._name:
            # Where torch's `new_group` keeps what its members tell each other.
            prefixes = (self._name, f"{self._name}/", f"{self._device.type}/")
            for prefix in prefixes:
                store = dist.PrefixStore(prefix, store)
        if self._device.type == "cuda":
            return _nccl_group(store, rank, size, self._timeout, self.meeting.interface)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # All have come. One that ends before it is connected would be awaited as long.
        options._timeout = min(self._timeout, _CONNECT)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        return dist.ProcessGroupGloo(store, rank, size, options)

    def gather(self, ranks: Iterable[int], size: int) -> None:
        """Tells the others that these members have come, and waits until all have. The waits of gloo and NCCL
        couldn't be ended. Raises as `join`."""
        self._say("member", ranks)
        try:
            self._await_all("member", range(size))
        except _GivenUpError as error:
            raise LostWeightsError(f"the weights aren't sent to those that wait for them: {error}") from None

    def finish(self, ranks: Iterable[int]) -> None:
        """Tells the sender that these members have received all."""
        self._say("done", ranks)

    def await_finished(self) -> None:
        """Waits until all others have received all: the sender keeps the store, in which they look, and what
        NCCL has yet to bring. Raises WorkerError if somebody gives the group up, or it takes too long."""
        try:
            self._await_all("done", range(1, self._size))
        except _GivenUpError as error:
            raise WorkerError(f"the weights stopped on their way: {error}") from None

    def _say(self, word: str, ranks: Iterable[int]) -> None:
        try:
            for rank in ranks:
                self._store.set(f"{word} {rank}", "")
        except RuntimeError as error:
            raise WorkerError(f"the sender of the weights has ended: {error}") from error

    def _await_all(self, word: str, ranks: Iterable[int]) -> None:
        """Waits until members have said a word. Raises _GivenUpError, and WorkerError past the timeout."""
        keys = [f"{word} {rank}" for rank in ranks]
        end = time.monotonic() + self._timeout.total_seconds()
        try:
            while not self._store.check(keys):
                self._require_wanted()
                if time.monotonic() > end:
                    missing = [key for key in keys if not self._store.check([key])]
                    raise WorkerError(
                        f"those who send and receive weights waited {self._timeout.total_seconds():g} s for "
                        f"{', '.join(missing)}"
                    )
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise WorkerError(f"the sender of the weights has ended: {error}") from error

    def _require_wanted(self) -> None:
        """Raises _GivenUpError if somebody has given the group up."""
        if self._store.check([_GIVEN_UP]):
            raise _GivenUpError(self._store.get(_GIVEN_UP).decode())

    def _await_connection(self) -> None:
        """Connects the GPUs. NCCL's own wait couldn't be ended, so a thread waits."""
        errors: list[RuntimeError] = []
        group = self._group

        def connect() -> None:
            try:
                group.eager_connect_single_device(self._device)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        end = time.monotonic() + self._timeout.total_seconds()
        while thread.is_alive():
            thread.join(_LOOK.total_seconds())
            if self._store.check([_GIVEN_UP]) or time.monotonic() > end:
                self.close()
                raise LostWeightsError("the GPUs of those who send and receive weights weren't connected")
        if errors:
            raise errors[0]

    def send(self, buckets: Iterable[Tensor]) -> None:
        """Sends bytes, which are on this member's device, to all members."""
        for _ in self._broadcast(buckets):
            continue

    def receive(self, buckets: Iterable[Tensor]) -> None:
        """Writes what rank 0 sends into memory of the same sizes, on this member's device."""
        self.send(buckets)

    def receive_tensors(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` as they come from rank 0, which sends `buckets_of(manifest)`. A bucket exists as
        long as a tensor of it."""
        buckets = buckets_of(manifest)
        memory = (torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device) for bucket in buckets)
        for bucket, data in zip(buckets, self._broadcast(memory), strict=True):
            yield from bucket.views(data)
        self.finish([self._rank])

    def _broadcast(self, buckets: Iterable[Tensor]) -> Iterator[Tensor]:
        """The buckets, each as soon as it has come. `_IN_FLIGHT` are on their way meanwhile."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        broadcasts: deque[Any] = deque()
        sent: deque[Tensor] = deque()
        has_ended = False
        try:
            for bucket in buckets:
                if len(broadcasts) == _IN_FLIGHT:
                    self._await_first(broadcasts)
                    yield sent.popleft()
                broadcasts.append(self._group.broadcast([bucket], options))
                sent.append(bucket)
            while broadcasts:
                self._await_first(broadcasts)
                yield sent.popleft()
            has_ended = True
        except _GivenUpError as error:
            self._abandon(broadcasts)
            raise WorkerError(f"the weights stopped on their way: {error}") from None
        except RuntimeError as error:
            raise WorkerError(f"the weights could not be sent to all members: {error}") from error
        finally:
            if not has_ended:
                # Closes the connections: members may wait for this one, and not for the one that has ended.
                broadcasts.clear()
                self.close()

    def _await_first(self, broadcasts: deque[Any]) -> None:
        """Waits for the oldest broadcast. Raises _GivenUpError if somebody gives the group up: a node that
        vanishes closes no connection. Raises RuntimeError if it fails or takes too long."""
        end = time.monotonic() + self._timeout.total_seconds()
        # No variable may hold a broadcast, which the traceback of an error would keep.
        while not self._is_over(broadcasts):
            self._require_wanted()
            if time.monotonic() > end:
                raise RuntimeError(f"it took more than {self._timeout.total_seconds():g} s")
        broadcasts.popleft()

    def _is_over(self, broadcasts: deque[Any]) -> bool:
        """Whether the oldest broadcast ends within `_LOOK`. Raises RuntimeError if it has failed."""
        if self._device.type != "cuda":
            try:
                broadcasts[0].wait(_LOOK)
            except RuntimeError:
                if broadcasts[0].is_completed():
                    raise
                return False
            return True
        # NCCL's own wait with a limit would abort the group past it.
        end = time.monotonic() + _LOOK.total_seconds()
        while not broadcasts[0].is_completed():
            if time.monotonic() > end:
                return False
            time.sleep(_SHORT_POLL_S)
        broadcasts[0].wait()
        return True

    def _abandon(self, broadcasts: deque[Any]) -> None:
        """Leaves a group in which somebody is waited for. The end of a group of gloo would wait as well, so a
        thread keeps it until then."""
        if self._device.type != "cuda":
            threading.Thread(target=_keep, args=(self._group, [*broadcasts]), daemon=True).start()
        self.close()

    def leave(self) -> None:
        """Leaves the group when nothing is on its way any more."""
        group = self._group
        self._group = None
        if group is not None and self._device.type == "cuda":
            group.shutdown()

    def close(self) -> None:
        """Leaves the group, whatever is on its way."""
        group = self._group
        self._group = None
        if group is not None and self._device.type == "cuda":
            # Kernels of NCCL would wait for the others.
            group.abort()


def _own_address(meeting: Meeting) -> str:
    """This node's address, as the sender of weights reaches it: that of a connection to the sender."""
    with closing(socket.create_connection((meeting.host, meeting.port))) as connection:
        address: str = connection.getsockname()[0]
    return address


def _keep(group: Any, broadcasts: list[Any]) -> None:
    """Holds a group as long as something in it is on its way."""
    for broadcast in broadcasts:
        with suppress(RuntimeError):
            broadcast.wait()


def _nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta, interface: str) -> Any:
    """A group of NCCL without torch's watchdog of it, which ends the process past `timeout`."""
    if interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    outer = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        # The groups of training have their own watchdog.
        del os.environ[_BLOCKING_WAIT]
        if outer is not None:
            os.environ[_BLOCKING_WAIT] = outer
