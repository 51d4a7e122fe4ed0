"""A copy of the weights on one device, which engines get without a way over the host."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from turnwise.errors import WorkerError
from turnwise.transfer.buckets import buckets_of
from turnwise.transfer.contracts import WeightSource
from turnwise.transfer.live import as_manifested
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.shared_memory import SharedMemory

_DEVICE_INDEX = 6
"""The place of the device among the arguments of torch's `rebuild_cuda_tensor`."""


class StagingMemory:
    """Memory on `device` for the tensors of a manifest, in buckets. With `dtype` (torch's name), wider
    tensors are narrowed as they are written.

    >>> from turnwise.transfer.live import manifest_of
    >>> tensors = [("a", torch.ones(2, 3)), ("b", torch.zeros(1, dtype=torch.bfloat16))]
    >>> memory = StagingMemory(manifest_of(tensors), "bfloat16", "cpu")
    >>> memory.write(tensors)
    >>> [bucket.numel() for bucket in memory.buckets], memory.manifest.num_bytes
    ([14], 14)
    """

    def __init__(self, manifest: WeightManifest, dtype: str, device: str) -> None:
        self.dtype = dtype
        self.device = device
        self.manifest = manifest.as_dtype(dtype) if dtype else manifest
        self.buckets: list[Tensor] = []
        """The bytes of the tensors: uint8, a tensor for each of `buckets_of(manifest)`."""
        self._source = manifest
        self._targets: dict[str, Tensor] = {}
        for bucket in buckets_of(self.manifest):
            data = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
            self.buckets.append(data)
            self._targets.update(bucket.views(data))

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors, which may be on any device, into the memory. Raises WorkerError if they aren't as
        in the manifest."""
        with torch.no_grad():
            for name, tensor in as_manifested(self._source, tensors):
                self._targets[name].copy_(tensor)
        if self.device.startswith("cuda"):
            # Readers of other processes don't wait for this process's stream.
            torch.cuda.synchronize(self.device)

    def handles(self) -> "DeviceWeights":
        """What another process needs to read the memory, on the same GPU, once. The memory has to exist until
        then."""
        uuid = device_id(self.device)
        handles: list[tuple[Any, ...]] = []
        for bucket in self.buckets:
            _, arguments = reduce_tensor(bucket)
            handles.append(_at_device(arguments, uuid))
        return DeviceWeights(self.manifest, tuple(handles))


@dataclass(frozen=True)
class DeviceWeights:
    """Named tensors in the memory of a GPU, which another process's `StagingMemory` holds (CUDA IPC). It can
    be pickled, and read once."""

    manifest: WeightManifest
    handles: Sequence[tuple[Any, ...]]
    """For each of `buckets_of(manifest)` the arguments of torch's `rebuild_cuda_tensor`, with the GPU's UUID
    for its number, which differs between processes."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`. Raises WorkerError if this process doesn't see the GPU."""
        for bucket, arguments in zip(buckets_of(self.manifest), self.handles, strict=True):
            index = _device_index(arguments[_DEVICE_INDEX])
            yield from bucket.views(rebuild_cuda_tensor(*_at_device(arguments, index)))

    def on(self, node: str) -> "DeviceWeights":
        return self


@dataclass(frozen=True)
class DeviceCopies:
    """One version of the weights, in a copy for each device of the servers, which a trainer's rank on the
    same device holds."""

    manifest: WeightManifest
    by_node: Mapping[str, Mapping[str, WeightSource]]
    """Node → `device_id` → the copy."""

    def on(self, node: str) -> "DeviceCopies":
        """The copies of a node. Raises WorkerError if it has none."""
        if node not in self.by_node:
            nodes = ", ".join(map(repr, self.by_node))
            raise WorkerError(f"ranks of the nodes {nodes} have copies of the weights, and none on {node!r}")
        return DeviceCopies(self.manifest, {node: self.by_node[node]})

    def by_device(self) -> dict[str, WeightSource]:
        """`device_id` → the copy. The ids of CPUs are those of one node."""
        copies: dict[str, WeightSource] = {}
        for of_node in self.by_node.values():
            copies.update(of_node)
        return copies

    def __iter__(self) -> NoReturn:
        raise WorkerError("copies of several devices are read one by one; `by_device` gives them")


def memory_for(
    memory: StagingMemory | SharedMemory | None,
    manifest: WeightManifest,
    dtype: str,
    device: str,
) -> StagingMemory | SharedMemory:
    """The memory of a copy that processes of the same device read: `memory` if it fits, or a new one. On a
    CPU it's shared memory."""
    if memory is not None and memory.dtype == dtype:
        return memory
    if device.startswith("cuda"):
        return StagingMemory(manifest, dtype, device)
    return SharedMemory(manifest, dtype)


def device_id(device: str | torch.device) -> str:
    """What all processes call a device: a GPU's UUID, or `cpu`."""
    device = torch.device(device)
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)


def _device_index(uuid: str) -> int:
    """The number of a GPU in this process."""
    for index in range(torch.cuda.device_count()):
        if device_id(f"cuda:{index}") == uuid:
            return index
    raise WorkerError(f"the weights are on the GPU {uuid}, which this process doesn't see")


def _at_device(arguments: tuple[Any, ...], device: int | str) -> tuple[Any, ...]:
    return (*arguments[:_DEVICE_INDEX], device, *arguments[_DEVICE_INDEX + 1 :])
