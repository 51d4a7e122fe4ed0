"""Reads tensors, or parts of them, from the shares of a checkpoint (docs/design/checkpoints.md)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from turnwise.errors import ModelError
from turnwise.model_files.share_index import (
    SHARES,
    Place,
    check_shares,
    has_shares,
    read_index,
    shape_text,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names of its two moments."""
MAX_FILE_BYTES = 10**9
"""Maximum bytes of a file of shares or of a plain folder. One row of a tensor, or in a plain folder one
tensor, isn't cut."""
_OF_OPTIMIZER = "optimizer."


def moment_key(moment: str, name: str) -> str:
    """The name under which shares have a moment of the parameter `name`."""
    return f"{_OF_OPTIMIZER}{moment}.{name}"


class Shares:
    """The tensors of a checkpoint that was written by shares. Raises ModelError if a share is missing,
    another checkpoint's, or doesn't fit the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index = read_index(folder)
        check_shares(folder, self._index)
        self._blocks = self._index.blocks()

    @property
    def weights(self) -> list[str]:
        """The names of the model's tensors; empty if only moments are here, those of adapters."""
        return [name for name in self._index.shapes if not name.startswith(_OF_OPTIMIZER)]

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._index.shapes[name])

    def whole(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor of this shape. Raises ModelError if the shares have none, or of another shape."""
        return self.part(name, shape, Place((0,) * len(shape), tuple(shape)))

    def rows(self, name: str, shape: Sequence[int], start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor of this shape. Raises ModelError as `whole`."""
        if not shape:
            return self.whole(name, shape)
        offsets = (start, *(0 for _ in shape[1:]))
        return self.part(name, shape, Place(offsets, (stop - start, *shape[1:])))

    def part(self, name: str, shape: Sequence[int], place: Place) -> Tensor:
        """The part at `place` of a tensor of this shape. Raises ModelError as `whole`."""
        self.require(name, shape)
        values: Tensor | None = None
        for file, of_block in self._blocks[name]:
            common = place.overlap(of_block)
            if common is None:
                continue
            with safe_open(self.folder / SHARES / file, "pt") as opened:
                stored = opened.get_slice(name) if shape else opened.get_tensor(name)
                block: Tensor = stored[_slices(common, of_block)]
            if values is None:
                values = torch.empty(place.sizes, dtype=block.dtype)
            values[_slices(common, place)] = block
        return torch.empty(place.sizes) if values is None else values

    def require(self, name: str, shape: Sequence[int]) -> None:
        """Raises ModelError if the shares have no tensor of this name and shape."""
        saved = self._index.shapes.get(name)
        if saved is None:
            raise ModelError(
                f"{self.folder}: the shares hold no tensor {name}, which this model has: it was saved from "
                "another model; set pretrain and lora_rank as they were"
            )
        if saved != tuple(shape):
            raise ModelError(
                f"{self.folder}: {name} is {shape_text(saved)} in the shares and {shape_text(tuple(shape))} "
                "in this model, which is another architecture; set pretrain as it was"
            )


def _slices(part: Place, of: Place) -> tuple[slice, ...]:
    """The slices that cut `part` out of the block at `of`."""
    starts = [offset - first for offset, first in zip(part.offsets, of.offsets, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, part.sizes, strict=True))


def open_shares(folder: Path) -> Shares | None:
    """The shares of a checkpoint; None if it has the form of whole tensors. Raises ModelError as `Shares`."""
    if not has_shares(folder):
        return None
    return Shares(folder)
