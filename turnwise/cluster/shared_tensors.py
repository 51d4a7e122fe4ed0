"""Named tensors in memory shared by two processes."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.errors import WorkerError

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor's place in a buffer, in bytes."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


class SharedTensors:
    """`(name, tensor)` pairs in an unnamed file that both processes map. It doesn't use /dev/shm, which is small in containers.

    >>> tensors = [("a", torch.ones(2, 3)), ("b", torch.zeros(1, dtype=torch.bfloat16))]
    >>> places, num_bytes = layout(tensors)
    >>> descriptor = new_buffer(num_bytes)
    >>> here, there = (SharedTensors(descriptor, num_bytes, places) for _ in range(2))
    >>> here.write(tensors)
    >>> {name: (tensor.sum().item(), tensor.dtype) for name, tensor in there}
    {'a': (6.0, torch.float32), 'b': (0.0, torch.bfloat16)}
    """

    def __init__(self, descriptor: int, num_bytes: int, places: dict[str, TensorSlot]) -> None:
        self.places = places
        self._buffer = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies in the values of tensors on any device.

        Raises:
            WorkerError: the tensors' names or shapes don't match the places.
        """
        missing = dict(self.places)
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
        return ((name, self._view(place)) for name, place in self.places.items())

    def _view(self, place: TensorSlot) -> Tensor:
        num_bytes = place.shape.numel() * place.dtype.itemsize
        return self._buffer[place.start : place.start + num_bytes].view(place.dtype).view(place.shape)


def layout(tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, TensorSlot], int]:
    """A place for each tensor, and the bytes of all. Keeps no tensor."""
    places, size = {}, 0
    for name, tensor in tensors:
        places[name] = TensorSlot(size, tensor.dtype, tensor.shape)
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, max(size, _ALIGNMENT)


def new_buffer(num_bytes: int) -> int:
    """The descriptor of an unnamed file, in memory if the system has such files."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("turnwise weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
