"""The trainer's side of a transfer: a worker on each of its ranks."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from turnwise.errors import WorkerError
from turnwise.runtime.rank import RankContext
from turnwise.transfer.contracts import DescribesWeights, WeightSource
from turnwise.transfer.group import Meeting, WeightGroup
from turnwise.transfer.live import LiveWeights, manifest_of
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.shared_memory import SharedMemory


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
    ) -> None:
        self._read = read
        self._is_shared = is_shared
        self._keeps = keeps
        self._describe = describe or (lambda: manifest_of(read()))
        self._manifest: WeightManifest | None = None
        self._memory: SharedMemory | None = None
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
            for _ in self._read():
                continue
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

    def open_group(self, host: str, timeout_s: float, interface: str = "") -> Meeting:
        """Begins to form a group with receivers of other nodes, which reach this node at the address of the
        network `interface` (empty: at `host`). A wait inside the group may take `timeout_s` seconds."""
        self._group = WeightGroup.open(host, timeout_s, interface)
        return self._group.meeting

    def join_group(self, size: int) -> None:
        """Waits for the receivers: with this rank, the group has `size` members."""
        self._opened_group.join(0, size)

    def send_to_group(self, size: int) -> None:
        """Waits for the receivers, then sends the weights of the last `publish`."""
        self.join_group(size)
        self.send()

    def send(self) -> None:
        """Sends the weights of the last `publish` to the members of the group."""
        if self._memory is None:
            raise WorkerError("no weights have been published that could be sent to other nodes")
        self._opened_group.send(self._memory)

    @property
    def _opened_group(self) -> WeightGroup:
        if self._group is None:
            raise WorkerError("the group of receivers of other nodes hasn't been opened")
        return self._group


def make_sender(role: str, is_shared: bool, rank: RankContext) -> WeightSender:
    """The sender of a role's worker in this process, which has been made before."""
    strategy: Any = rank.neighbours[role]
    describe = strategy.weight_manifest if isinstance(strategy, DescribesWeights) else None
    return WeightSender(strategy.weights, is_shared, rank.answers, describe)
