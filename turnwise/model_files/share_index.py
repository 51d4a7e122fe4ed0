"""The index of a checkpoint's shares: which file holds which block of which tensor
(docs/design/checkpoints.md). Nothing here reads a tensor."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.errors import ModelError, listed
from turnwise.model_files.folder import SHARES, file_headers

INDEX_FILE = "index.json"
_FORMAT = 1
_SAVE_AGAIN = "continue from another checkpoint"

Shape = tuple[int, ...]


class Place(NamedTuple):
    """Where a block of a tensor lies in the tensor."""

    offsets: Shape
    sizes: Shape

    def overlap(self, other: "Place") -> "Place | None":
        """What both places have in common; None if that is nothing.

        >>> Place((0, 0), (3, 2)).overlap(Place((2, 0), (4, 2)))
        Place(offsets=(2, 0), sizes=(1, 2))
        """
        offsets = [max(pair) for pair in zip(self.offsets, other.offsets, strict=True)]
        ends = [min(pair) for pair in zip(self.ends, other.ends, strict=True)]
        sizes = [end - offset for offset, end in zip(offsets, ends, strict=True)]
        if any(size <= 0 for size in sizes):
            return None
        return Place(tuple(offsets), tuple(sizes))

    @property
    def ends(self) -> Shape:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


class ShareFile(NamedTuple):
    """A file of blocks: its size, its digest, and the place of each block by the name of its tensor."""

    num_bytes: int
    sha256: str
    places: Mapping[str, Place]


@dataclass(frozen=True, slots=True)
class ShareIndex:
    """The shapes of tensors by name, and the files of their blocks by name in the folder `SHARES`."""

    shapes: Mapping[str, Shape]
    files: Mapping[str, ShareFile]

    def blocks(self) -> dict[str, list[tuple[str, Place]]]:
        """`(file, place)` of each block, by the name of the tensor."""
        blocks: dict[str, list[tuple[str, Place]]] = {name: [] for name in self.shapes}
        for file, contents in self.files.items():
            for name, place in contents.places.items():
                blocks[name].append((file, place))
        return blocks

    def write(self, folder: Path) -> None:
        """Writes the index of the checkpoint `folder`. Raises OSError if it can't be written."""
        files: dict[str, Any] = {}
        for file, contents in self.files.items():
            files[file] = {
                "bytes": contents.num_bytes,
                "sha256": contents.sha256,
                "blocks": {name: [place.offsets, place.sizes] for name, place in contents.places.items()},
            }
        values = {"format": _FORMAT, "shapes": self.shapes, "files": files}
        (folder / SHARES / INDEX_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def has_shares(folder: Path) -> bool:
    """Whether a checkpoint was written by shares."""
    return (folder / SHARES).is_dir()


def read_index(folder: Path) -> ShareIndex:
    """The index of the checkpoint `folder`. Raises ModelError if it can't be read."""
    file = folder / SHARES / INDEX_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            raise ValueError(f"its format is {values['format']!r}, and this version reads {_FORMAT}")
        shapes = {str(name): _numbers(shape) for name, shape in values["shapes"].items()}
        files = {str(name): _share_file(contents) for name, contents in values["files"].items()}
        for name, contents in files.items():
            unknown = contents.places.keys() - shapes.keys()
            if unknown or not _is_inside(name):
                raise ValueError(f"{name!r} can't be a file of it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise ModelError(f"{file} isn't an index of shares ({fault}); {_SAVE_AGAIN}") from fault
    return ShareIndex(shapes, files)


def _is_inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


def _share_file(contents: Mapping[str, Any]) -> ShareFile:
    places: dict[str, Place] = {}
    for name, (offsets, sizes) in contents["blocks"].items():
        places[name] = Place(_numbers(offsets), _numbers(sizes))
    return ShareFile(int(contents["bytes"]), str(contents["sha256"]), places)


def _numbers(values: Iterable[int]) -> Shape:
    return tuple(int(value) for value in values)


def check_shares(folder: Path, index: ShareIndex) -> None:
    """Raises ModelError if the files of the checkpoint `folder` aren't those of its index, or don't hold
    every tensor exactly once. Reads headers only."""
    shares = folder / SHARES
    present = {str(file.relative_to(shares)) for file in shares.rglob("*.safetensors")}
    foreign = sorted(present - index.files.keys())
    if foreign:
        raise ModelError(
            f"{shares} holds {listed(foreign)}, a share that its {INDEX_FILE} doesn't name, so it is another "
            f"checkpoint's; remove it, or {_SAVE_AGAIN}"
        )
    missing = sorted(index.files.keys() - present)
    if missing:
        raise ModelError(
            f"{shares} lacks {listed(missing)}, so a share of the model is missing; copy it back, or "
            f"{_SAVE_AGAIN}"
        )
    for name, contents in index.files.items():
        _check_file(shares / name, contents)
    for name, blocks in index.blocks().items():
        fault = fault_of_tiling(index.shapes[name], [place for _, place in blocks])
        if fault:
            raise ModelError(f"{shares}: the shares of {name} {fault}; {_SAVE_AGAIN}")


def _check_file(file: Path, contents: ShareFile) -> None:
    size = file.stat().st_size
    if size != contents.num_bytes:
        raise ModelError(
            f"{file} has {size} bytes, and {INDEX_FILE} says {contents.num_bytes}: it isn't the share that "
            f"was written; {_SAVE_AGAIN}"
        )
    headers = file_headers(file)
    if headers.keys() != contents.places.keys():
        differing = sorted(headers.keys() ^ contents.places.keys())
        raise ModelError(
            f"{file} holds other tensors than {INDEX_FILE} says ({listed(differing)}): it is another "
            f"checkpoint's share; {_SAVE_AGAIN}"
        )
    for name, place in contents.places.items():
        if headers[name].shape != place.sizes:
            raise ModelError(
                f"{file}: its block of {name} has shape {shape_text(headers[name].shape)}, and {INDEX_FILE} "
                f"says {shape_text(place.sizes)}; {_SAVE_AGAIN}"
            )


def fault_of_tiling(shape: Shape, places: Sequence[Place]) -> str:
    """What keeps blocks from being the whole tensor, as the end of a sentence; empty if nothing does.

    >>> fault_of_tiling((4, 2), [Place((0, 0), (2, 2)), Place((2, 0), (2, 2))])
    ''
    >>> fault_of_tiling((4, 2), [Place((0, 0), (2, 2))])
    'hold 4 of its 8 values'
    >>> fault_of_tiling((4, 2), [Place((0, 0), (3, 2)), Place((2, 0), (1, 2))])
    'overlap at row 2'
    """
    whole = Place((0,) * len(shape), shape)
    active: list[Place] = []
    for place in sorted(places):
        if len(place.offsets) != len(shape) or whole.overlap(place) != place:
            return f"lie outside its shape {shape_text(shape)}"
        active = [other for other in active if other.ends[:1] > place.offsets[:1]]
        if any(other.overlap(place) for other in active):
            return f"overlap at row {place.offsets[0]}"
        active.append(place)
    num_held = sum(math.prod(place.sizes) for place in places)
    if num_held != math.prod(shape):
        return f"hold {num_held} of its {math.prod(shape)} values"
    return ""


def shape_text(shape: Shape) -> str:
    return " × ".join(str(size) for size in shape) or "of one number"
