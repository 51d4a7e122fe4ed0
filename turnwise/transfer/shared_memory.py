"""The form of a transfer on one node: memory that several processes map. It holds a safetensors file, so that
an engine of another library reads the same bytes."""

import json
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import LostWeightsError, WorkerError
from turnwise.transfer import buckets
from turnwise.transfer.live import as_manifested
from turnwise.transfer.manifest import WeightManifest

_ALIGNMENT = 64
_LENGTH_BYTES = 8  # the length of a safetensors file's header stands before it
_FILE_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Torch's name of a dtype → safetensors' name."""


@dataclass(frozen=True)
class SharedWeights:
    """Named tensors in a safetensors file in memory that several processes map. It can be pickled; whoever
    iterates over it maps the memory, as long as the `SharedMemory` that it belongs to exists."""

    manifest: WeightManifest
    path: str
    """The file, for processes of the same node."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`. Raises LostWeightsError as `hold`."""
        return iter(_Layout(self.manifest).views(_mapped(self.path)).items())

    def on(self, node: str) -> "SharedWeights":
        return self

    def hold(self) -> int:
        """A descriptor of the file, for the caller to close. The memory exists as long as it is open. Raises
        LostWeightsError if the process that the memory belongs to has ended."""
        return _opened(self.path)


class SharedMemory:
    """Memory for the tensors of a manifest, outside /dev/shm, which is small in containers. With `dtype`
    (torch's name), wider tensors are narrowed as they are written. Raises WorkerError if memory is short.

    >>> from turnwise.transfer.live import manifest_of
    >>> tensors = [("a", torch.ones(2, 3)), ("b", torch.zeros(1, dtype=torch.bfloat16))]
    >>> memory = SharedMemory(manifest_of(tensors))
    >>> memory.write(tensors)
    >>> {name: (tensor.sum().item(), tensor.dtype) for name, tensor in memory.weights}
    {'a': (6.0, torch.float32), 'b': (0.0, torch.bfloat16)}
    """

    def __init__(self, manifest: WeightManifest, dtype: str = "") -> None:
        self.dtype = dtype
        self._manifest = manifest
        stored = manifest.as_dtype(dtype) if dtype else manifest
        layout = _Layout(stored)
        # Others can open the path as long as this file is open.
        path, self._file = _new_file(layout.num_bytes)
        self.weights = SharedWeights(stored, path)
        buffer = _mapped(path)
        buffer[: layout.start] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        self._data = buffer[layout.start :]
        self._targets = layout.views(buffer)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors, which may be on any device, into the memory. Raises WorkerError if they aren't as
        in the manifest."""
        with torch.no_grad():
            for name, tensor in as_manifested(self._manifest, tensors):
                self._targets[name].copy_(tensor)

    @property
    def buckets(self) -> Sequence[Tensor]:
        """The bytes of all tensors, one after the other, in pieces of `BUCKET_BYTES`. What is written into a
        piece is written into the tensors."""
        return self._data.split(buckets.BUCKET_BYTES)


class _Layout:
    """Where each tensor of a manifest lies in a safetensors file, which has no gaps: tensors of wider dtypes
    come first, so that each begins at a multiple of its width."""

    def __init__(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        names = sorted(manifest.tensors, key=self._width, reverse=True)
        self._starts: dict[str, int] = {}
        self._num_bytes = 0
        for name in names:
            self._starts[name] = self._num_bytes
            self._num_bytes += manifest.tensors[name].num_bytes
        self.header = self._packed_header(names)

    @property
    def start(self) -> int:
        """Number of bytes before the first tensor."""
        return len(self.header)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the file."""
        return self.start + self._num_bytes

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in the bytes of a file, in the order of the manifest."""
        views = {}
        for name, spec in self._manifest.tensors.items():
            start = self.start + self._starts[name]
            tensor = buffer[start : start + spec.num_bytes].view(_dtype(spec.dtype))
            views[name] = tensor.view(spec.shape)
        return views

    def _width(self, name: str) -> int:
        return _dtype(self._manifest.tensors[name].dtype).itemsize

    def _packed_header(self, names: Iterable[str]) -> bytes:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name in names:
            spec = self._manifest.tensors[name]
            start = self._starts[name]
            offsets = (start, start + spec.num_bytes)
            dtype = _FILE_DTYPES[spec.dtype]
            entries[name] = {"dtype": dtype, "shape": spec.shape, "data_offsets": offsets}
        text = json.dumps(entries).encode()
        num_spaces = -(_LENGTH_BYTES + len(text)) % _ALIGNMENT
        text += b" " * num_spaces
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _dtype(name: str) -> torch.dtype:
    if name not in _FILE_DTYPES:
        raise WorkerError(
            f"weights of the dtype {name} can't be sent to other processes; allowed are "
            f"{', '.join(_FILE_DTYPES)} (actor_train.model_args.dtype)"
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _mapped(path: str) -> Tensor:
    """The bytes of a file, which stay mapped as long as the tensor or a view of it exists."""
    descriptor = _opened(path)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError as error:
        raise LostWeightsError(
            f"the weights at {path} are gone: the process that had them for its node has ended"
        ) from error


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
