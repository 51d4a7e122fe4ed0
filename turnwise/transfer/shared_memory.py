"""The form of a transfer between processes of one machine: memory that all of them map."""

import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import WorkerError
from turnwise.transfer.live import as_manifested
from turnwise.transfer.manifest import TensorSpec, WeightManifest

_ALIGNMENT = 64


@dataclass(frozen=True)
class SharedWeights:
    """Named tensors in memory that several processes map. It can be pickled; whoever iterates over it maps
    the memory, as long as the `SharedMemory` that it belongs to exists."""

    manifest: WeightManifest
    path: str

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(_views(self.manifest, _mapped(self.path, _size(self.manifest))).items())


class SharedMemory:
    """Memory for named tensors, outside /dev/shm, which is small in containers. Raises WorkerError if memory
    is short.

    >>> from turnwise.transfer.live import manifest_of
    >>> tensors = [("a", torch.ones(2, 3)), ("b", torch.zeros(1, dtype=torch.bfloat16))]
    >>> memory = SharedMemory(manifest_of(tensors))
    >>> memory.write(tensors)
    >>> {name: (tensor.sum().item(), tensor.dtype) for name, tensor in memory.weights}
    {'a': (6.0, torch.float32), 'b': (0.0, torch.bfloat16)}
    """

    def __init__(self, manifest: WeightManifest) -> None:
        num_bytes = _size(manifest)
        # Others can open the path as long as this file is open.
        path, self._file = _new_file(num_bytes)
        self.weights = SharedWeights(manifest, path)
        self._targets = _views(manifest, _mapped(path, num_bytes))

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors, which may be on any device, into the memory. Raises WorkerError if they aren't as
        in the manifest."""
        with torch.no_grad():
            for name, tensor in as_manifested(self.weights.manifest, tensors):
                self._targets[name].copy_(tensor)


def _size(manifest: WeightManifest) -> int:
    return max(_ALIGNMENT, sum(_padded(spec) for spec in manifest.tensors.values()))


def _padded(spec: TensorSpec) -> int:
    return -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _mapped(path: str, num_bytes: int) -> Tensor:
    """The bytes of a file, which stay mapped as long as the tensor or a view of it exists."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _views(manifest: WeightManifest, buffer: Tensor) -> dict[str, Tensor]:
    """The tensors of a manifest in a buffer of bytes, one after the other."""
    views = {}
    start = 0
    for name, spec in manifest.tensors.items():
        dtype: torch.dtype = getattr(torch, spec.dtype)
        views[name] = buffer[start : start + spec.num_bytes].view(dtype).view(spec.shape)
        start += _padded(spec)
    return views


def _new_file(num_bytes: int) -> tuple[str, Any]:
    """Makes a file of this size, on Linux in memory. Returns `(path, file)`. Others can open `path` until
    `file` is closed."""
    if sys.platform == "linux":
        file: Any = open(os.memfd_create("turnwise weights"), "r+b")  # noqa: SIM115
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        file = tempfile.NamedTemporaryFile(prefix="turnwise-")  # noqa: SIM115
        path = file.name
    try:
        if "posix_fallocate" in dir(os):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:
            os.ftruncate(file.fileno(), num_bytes)
    except OSError as error:
        file.close()
        raise WorkerError(
            f"the {num_bytes / 2**20:.0f} MB that bring the weights to other processes can't be had: "
            f"{error.strerror}; "
            "leave them free, or train and sample in one process (async_generation_ratio: 0, one device)"
        ) from error
    return path, file
