"""Weights for an engine that reads them itself: a folder of safetensors files."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from turnwise.transfer.contracts import WeightSource
from turnwise.transfer.live import manifest_of
from turnwise.transfer.shared_memory import SharedMemory, SharedWeights


class WeightFolder:
    """A folder that holds a link to weights in shared memory, so that it costs no copy. They stay until it is
    removed, even if the process that they belong to ends meanwhile. With `memory`, they are the folder's own.
    Raises LostWeightsError if that process has ended before."""

    def __init__(self, weights: SharedWeights, memory: SharedMemory | None = None) -> None:
        self._held = weights.hold()
        self.path = Path(tempfile.mkdtemp(prefix="turnwise-weights-"))
        self.num_bytes = weights.manifest.num_bytes
        self._memory = memory
        path = weights.path
        if sys.platform == "linux":
            path = f"/proc/{os.getpid()}/fd/{self._held}"
        (self.path / "model.safetensors").symlink_to(path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)
        self._memory = None


def folder_of(weights: WeightSource, dtype: str) -> WeightFolder:
    """A folder with these weights. Those in shared memory are read there by all replicas of a node; any
    other are copied into shared memory, in `dtype` (torch's name) if that is narrower."""
    if isinstance(weights, SharedWeights):
        return WeightFolder(weights)
    tensors = _without_ties(weights)
    memory = SharedMemory(manifest_of(tensors.items()), dtype)
    memory.write(tensors.items())
    return WeightFolder(memory.weights, memory)


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of all safetensors files in a folder, which stay where they are."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def _without_ties(weights: WeightSource) -> dict[str, Tensor]:
    """The tensors, of tied ones only the first name, as in a checkpoint."""
    first_names: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
    for name, tensor in weights:
        first_names.setdefault((tensor.data_ptr(), tensor.shape), (name, tensor))
    return dict(first_names.values())
