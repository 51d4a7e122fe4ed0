"""Named tensors in memory that processes of one machine share."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import WorkerError

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor starts in a buffer, in bytes, and its dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class Shared:
    """Describes named tensors in memory, so that another process of this machine can map them."""

    path: str
    num_bytes: int
    places: dict[str, TensorSlot]


class SharedTensors:
    """`(name, tensor)` pairs in memory that several processes map, outside /dev/shm, which is small in containers.

    >>> tensors = [("a", torch.ones(2, 3)), ("b", torch.zeros(1, dtype=torch.bfloat16))]
    >>> here = SharedTensors.of(tensors)
    >>> here.write(tensors)
    >>> there = SharedTensors(here.shared)
    >>> {name: (tensor.sum().item(), tensor.dtype) for name, tensor in there}
    {'a': (6.0, torch.float32), 'b': (0.0, torch.bfloat16)}
    """

    def __init__(self, shared: Shared, file: Any = None) -> None:
        """Maps the memory. The process that made the memory passes its open `file`. Others can map it while `file` is open."""
        self.shared = shared
        self._file = file
        descriptor = os.open(shared.path, os.O_RDWR)
        try:
            self._buffer = torch.frombuffer(mmap.mmap(descriptor, shared.num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> SharedTensors:
        """Allocates memory for named tensors, and doesn't write their values yet. Raises WorkerError if memory is short."""
        places, size = {}, 0
        for name, tensor in tensors:
            places[name] = TensorSlot(size, tensor.dtype, tensor.shape)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        size = max(size, _ALIGNMENT)
        path, file = _new_file(size)
        return cls(Shared(path, size, places), file)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors, which may be on any device, into the memory. Raises WorkerError if a name, dtype or shape differs."""
        missing = dict(self.shared.places)
        with torch.no_grad():
            for name, tensor in tensors:
                place = missing.pop(name, None)
                if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
                    expected = "unknown" if place is None else f"{place.dtype} {list(place.shape)}"
                    got = f"{tensor.dtype} {list(tensor.shape)}"
                    raise WorkerError(f"{name} is {got} now, but it was {expected} when the tensors were first sent")
                self._view(place).copy_(tensor)
        if missing:
            raise WorkerError(f"{next(iter(missing))} is missing, but it was among the tensors when they were first sent")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._view(place)) for name, place in self.shared.places.items())

    def _view(self, place: TensorSlot) -> Tensor:
        num_bytes = place.shape.numel() * place.dtype.itemsize
        return self._buffer[place.start : place.start + num_bytes].view(place.dtype).view(place.shape)


def opened_once() -> Callable[[Shared], SharedTensors]:
    """Returns a function that maps shared tensors. Later calls with the same `Shared` return the object of the first call."""
    opened: dict[str, SharedTensors] = {}
    return lambda shared: opened.get(shared.path) or opened.setdefault(shared.path, SharedTensors(shared))


class Written:
    """Writes named tensors into shared memory, which the first write allocates and later writes reuse."""

    def __init__(self) -> None:
        self._tensors: SharedTensors | None = None

    def __call__(self, tensors: Callable[[], Iterable[tuple[str, Any]]]) -> SharedTensors:
        """Writes the tensors of `tensors()` to shared memory. The first write calls `tensors` twice, once for the shapes."""
        self._tensors = self._tensors or SharedTensors.of(tensors())
        self._tensors.write(tensors())
        return self._tensors

    def share(self, tensors: Iterable[tuple[str, Any]]) -> SharedTensors:
        """Copies tensors into shared memory and returns them there. SharedTensors are returned as they are."""
        if isinstance(tensors, SharedTensors):
            return tensors
        pairs = list(tensors)
        return self(lambda: pairs)


def _new_file(num_bytes: int) -> tuple[str, Any]:
    """Makes a file of this size, on Linux in memory. Returns `(path, file)`. Others can open `path` until `file` is closed."""
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
            f"the {num_bytes / 2**20:.0f} MB that bring the weights to other processes can't be had: {error.strerror}; "
            "leave them free, or train and sample in one process (async_generation_ratio: 0, one device)"
        ) from error
    return path, file
