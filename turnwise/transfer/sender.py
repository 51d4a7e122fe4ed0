"""The trainer's side of a transfer: a worker on each of its ranks."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor

from turnwise.errors import WorkerError
from turnwise.runtime.rank import RankContext
from turnwise.transfer.contracts import DescribesWeights, WeightSource
from turnwise.transfer.group import Meeting
from turnwise.transfer.live import LiveWeights, manifest_of
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.shared_memory import SharedMemory
from turnwise.transfer.staging import StagingMemory, device_id, memory_for
from turnwise.transfer.weight_group import WeightGroup


class WeightSender:
    """Sends the weights that `read` iterates over: inside its process, or to others if `is_shared`. If a
    model is sharded, iterating gathers it, so all ranks must be called together. Only the rank with `keeps`
    holds on to what it reads. `describe` gives the manifest of what `read` would; without it, it is read off
    one iteration."""

    def __init__(
        self,
        read: Callable[[], Iterable[tuple[str, Tensor]]],
        is_shared: bool,
        keeps: bool = True,
        describe: Callable[[], WeightManifest] | None = None,
        device: str = "cpu",
        rank: int = 0,
    ) -> None:
        self._read = read
        self._is_shared = is_shared
        self._keeps = keeps
        self._describe = describe or (lambda: manifest_of(read()))
        self._manifest: WeightManifest | None = None
        self._device = device
        self._rank = rank
        self._memory: SharedMemory | None = None
        self._staging: StagingMemory | None = None
        self._copy: StagingMemory | SharedMemory | None = None
        self._group: WeightGroup | None = None

    def manifest(self) -> WeightManifest:
        """The names, shapes and dtypes of the weights. The first call may iterate over them."""
        if self._manifest is None:
            self._manifest = self._describe()
        return self._manifest

    def publish(self, dtype: str = "") -> WeightSource | None:
        """The weights as they are now, narrowed to `dtype` (torch's name; empty: the trainer's) where they
        are shared. Shared memory keeps them until the next call. None on a rank that keeps nothing."""
        manifest = self.manifest()
        if not self._keeps:
            self._pass_through()
            return None
        if not self._is_shared:
            return LiveWeights(manifest, self._read)
        if self._memory is None or self._memory.dtype != dtype:
            self._memory = SharedMemory(manifest, dtype)
        self._memory.write(self._read())
        return self._memory.weights

    def published(self) -> WeightSource:
        """What the last `publish` returned."""
        if self._memory is None:
            return LiveWeights(self.manifest(), self._read)
        return self._memory.weights

    def stage(self, dtype: str, device_type: str) -> WeightManifest | None:
        """Copies the weights as they are now, narrowed to `dtype`, into memory of this rank's device, or of
        its host if `device_type` is `cpu`, from where `send_to_group` sends them. The memory keeps them until
        the next call. None on a rank that keeps nothing."""
        manifest = self.manifest()
        if not self._keeps:
            self._pass_through()
            return None
        device = "cpu" if device_type == "cpu" else self._device
        if self._staging is None or self._staging.dtype != dtype:
            self._staging = StagingMemory(manifest, dtype, device)
        self._staging.write(self._read())
        return self._staging.manifest

    def staged(self) -> WeightManifest:
        """What the last `stage` returned."""
        return self._opened_staging.manifest

    def copy(self, dtype: str, ranks: Collection[int]) -> None:
        """Copies the weights as they are now, narrowed to `dtype`, into memory of this rank's device, for
        servers on the same device, if it is one of the `ranks`."""
        manifest = self.manifest()
        if self._rank not in ranks:
            self._pass_through()
            return
        self._copy = memory_for(self._copy, manifest, dtype, self._device)
        self._copy.write(self._read())

    def copied(self) -> tuple[str, WeightSource]:
        """`device_id` and what the last `copy` made, to be read once. The memory keeps it until the next
        call of `copy`."""
        if self._copy is None:
            raise WorkerError("no weights have been copied for engines on this device")
        weights = self._copy.handles() if isinstance(self._copy, StagingMemory) else self._copy.weights
        return device_id(self._device), weights

    def open_group(
        self,
        host: str,
        timeout_s: float,
        interface: str = "",
        device_type: str = "cpu",
        name: str = "",
    ) -> Meeting:
        """Begins to form a group with receivers in other processes, which reach this node at the address of
        the network `interface` (empty: at `host`). A wait inside the group may take `timeout_s` seconds. See
        `WeightGroup` for `name`."""
        device = "cpu" if device_type == "cpu" else self._device
        self._group = WeightGroup.open(host, timeout_s, interface, device, name)
        return self._group.meeting

    def join_group(self, size: int) -> None:
        """Waits for the receivers: with this rank, the group has `size` members."""
        self._opened_group.join(0, size)

    def send_to_group(self, size: int) -> None:
        """Waits for the receivers, then sends the weights of the last `stage`, and leaves the group."""
        group = self._opened_group
        self._group = None
        group.join(0, size)
        group.send(self._opened_staging.buckets)
        group.await_finished()
        group.leave()

    def send(self) -> None:
        """Sends the weights of the last `publish` to the members of the group."""
        if self._memory is None:
            raise WorkerError("no weights have been published that could be sent to other nodes")
        self._opened_group.send(self._memory.buckets)

    def _pass_through(self) -> None:
        """Takes part in a gather whose results others keep."""
        for _ in self._read():
            continue

    @property
    def _opened_staging(self) -> StagingMemory:
        if self._staging is None:
            raise WorkerError("no weights have been copied for engines that receive them")
        return self._staging

    @property
    def _opened_group(self) -> WeightGroup:
        if self._group is None:
            raise WorkerError("the group of receivers of other nodes hasn't been opened")
        return self._group


def make_sender(role: str, is_shared: bool, rank: RankContext) -> WeightSender:
    """The sender of a role's worker in this process, which has been made before."""
    strategy: Any = rank.neighbours[role]
    describe = strategy.weight_manifest if isinstance(strategy, DescribesWeights) else None
    return WeightSender(strategy.weights, is_shared, rank.answers, describe, rank.device, rank.rank)
