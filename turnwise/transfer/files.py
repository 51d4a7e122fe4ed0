"""The form of a transfer to an engine that reads weights itself: safetensors files in a folder."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from turnwise.transfer.contracts import NamedTensors

_FILE_BYTES = 2**30  # a file of weights is written as soon as its tensors exceed this size
_SPARE_BYTES = 2**30  # bytes of shared memory that weights leave free
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """A folder of safetensors files, and the number of bytes of their tensors."""

    path: Path
    num_bytes: int

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def write_folder(weights: NamedTensors) -> WeightFolder:
    """Writes weights as safetensors files into a new folder, in shared memory if there is room. Tied tensors
    are written once, under their first name, as in a checkpoint."""
    first_names: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
    for name, tensor in weights:
        first_names.setdefault((tensor.data_ptr(), tensor.shape), (name, tensor))
    pairs = list(first_names.values())
    num_bytes = sum(tensor.nbytes for _, tensor in pairs)
    folder = Path(tempfile.mkdtemp(prefix="turnwise-weights-", dir=_place_for(num_bytes)))
    part: dict[str, Tensor] = {}
    for index, (name, tensor) in enumerate(pairs, 1):
        # A copy: safetensors refuses tensors that are views of one storage.
        part[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if index == len(pairs) or sum(tensor.nbytes for tensor in part.values()) > _FILE_BYTES:
            save_file(part, folder / f"model-{index:05d}.safetensors", {"format": "pt"})
            part.clear()
    return WeightFolder(folder, num_bytes)


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of all safetensors files in a folder. One file is in memory at a time."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def _place_for(num_bytes: int) -> Path | None:
    """Shared memory if it has room; None = the folder for temporary files."""
    if not _SHARED_MEMORY.is_dir():
        return None
    has_room = shutil.disk_usage(_SHARED_MEMORY).free > num_bytes + _SPARE_BYTES
    return _SHARED_MEMORY if has_room else None
