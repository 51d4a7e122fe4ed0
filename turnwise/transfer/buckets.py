"""The messages in which weights travel: buckets of whole tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.transfer.manifest import TensorSpec, WeightManifest

BUCKET_BYTES = 16_000_000
"""Bytes that travel in one message. Of 4 to 32 MB all are about as fast; tensor by tensor is five times
slower."""


@dataclass(frozen=True)
class Bucket:
    """Tensors whose bytes follow each other, without gaps. Each begins at a multiple of its width."""

    tensors: Mapping[str, TensorSpec]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors.values())

    def views(self, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors by name, in `data`, uint8 [num_bytes], on its device."""
        start = 0
        for name, spec in self.tensors.items():
            end = start + spec.num_bytes
            dtype: torch.dtype = getattr(torch, spec.dtype)
            yield name, data[start:end].view(dtype).view(spec.shape)
            start = end


def buckets_of(manifest: WeightManifest, num_bytes: int | None = None) -> list[Bucket]:
    """The tensors of a manifest in its order, in buckets of at most `num_bytes` (None: `BUCKET_BYTES`). A
    larger tensor has a bucket of its own.

    >>> specs = {name: TensorSpec((size,), "int8", size) for name, size in [("a", 3), ("b", 4), ("c", 9)]}
    >>> [list(bucket.tensors) for bucket in buckets_of(WeightManifest(specs), num_bytes=8)]
    [['a', 'b'], ['c']]
    """
    num_bytes = num_bytes or BUCKET_BYTES
    buckets: list[dict[str, TensorSpec]] = []
    size = 0
    for name, spec in manifest.tensors.items():
        width = getattr(torch, spec.dtype).itemsize
        is_aligned = size % width == 0
        if not buckets or size + spec.num_bytes > num_bytes or not is_aligned:
            buckets.append({})
            size = 0
        buckets[-1][name] = spec
        size += spec.num_bytes
    return [Bucket(tensors) for tensors in buckets]
