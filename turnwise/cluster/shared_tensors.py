"""Named tensors in memory that two processes see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a buffer a tensor lies, in bytes."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """`(name, tensor)` pairs in one buffer of bytes. Pickled by `multiprocessing` only the buffer's handle goes over, and both
    sides see what `write` writes.

    >>> shared = SharedTensors.like([("a", torch.ones(2, 3)), ("b", torch.zeros(1, dtype=torch.float64))])
    >>> shared.write([("a", torch.full((2, 3), 7.0)), ("b", torch.ones(1, dtype=torch.float64))])
    >>> {name: tensor.sum().item() for name, tensor in shared}
    {'a': 42.0, 'b': 1.0}
    """

    buffer: Tensor
    places: dict[str, Place]

    @classmethod
    def like(cls, tensors: list[tuple[str, Tensor]]) -> SharedTensors:
        """Room for tensors of these names, shapes and dtypes."""
        places, size = {}, 0
        for name, tensor in tensors:
            places[name] = Place(size, tensor.dtype, tensor.shape)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(torch.empty(size, dtype=torch.uint8).share_memory_(), places)

    def write(self, tensors: Iterator[tuple[str, Tensor]] | list[tuple[str, Tensor]]) -> None:
        """Takes over the values of tensors on any device."""
        with torch.no_grad():
            for name, tensor in tensors:
                self._view(self.places[name]).copy_(tensor)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._view(place)) for name, place in self.places.items())

    def _view(self, place: Place) -> Tensor:
        num_bytes = place.shape.numel() * place.dtype.itemsize
        return self.buffer[place.start : place.start + num_bytes].view(place.dtype).view(place.shape)
