"""Writes a checkpoint by shares: each rank writes blocks of tensors (docs/design/checkpoints.md)."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from turnwise.errors import first_line
from turnwise.model_files.share_index import SHARES, Place, ShareFile, ShareIndex
from turnwise.models.shares import MAX_FILE_BYTES
from turnwise.runtime.disk import free_bytes, require_space
from turnwise.training.ranks import Ranks

_HEADER_BYTES = 4096
_ENTRY_BYTES = 512
"""Space for a file's header, and for each block in it."""


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of the tensor `name`, which has this whole `shape`. `values` begin at `offsets` in it."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor
    is_written: bool = True
    """Whether this rank writes it. One that another copy of the model writes is only counted, so that all
    copies fill their files alike."""

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + _ENTRY_BYTES

    @property
    def place(self) -> Place:
        return Place(self.offsets, tuple(self.values.shape))

    def pieces(self, max_bytes: int) -> Iterator["Block"]:
        """The block, cut by rows into pieces of at most `max_bytes`; a row isn't cut."""
        if self.num_bytes <= max_bytes or not self.shape:
            yield self
            return
        num_rows = len(self.values)
        bytes_of_row = self.values.nbytes // num_rows
        step = max(1, (max_bytes - _ENTRY_BYTES) // bytes_of_row)
        for start in range(0, num_rows, step):
            offsets = (self.offsets[0] + start, *self.offsets[1:])
            yield replace(self, offsets=offsets, values=self.values[start : start + step])


def file_contents(blocks: Iterable[Block], max_bytes: int) -> Iterator[list[Block]]:
    """Deals blocks to files of at most `max_bytes`, in their order. Of one tensor a file holds one block."""
    contents: list[Block] = []
    size = _HEADER_BYTES
    for block in blocks:
        for piece in block.pieces(max_bytes - _HEADER_BYTES):
            if contents and size + piece.num_bytes > max_bytes:
                yield contents
                contents = []
                size = _HEADER_BYTES
            contents.append(piece)
            size += piece.num_bytes
    if contents:
        yield contents


def require_space_for_all(folder: Path, num_bytes: int, ranks: Ranks) -> None:
    """Raises OSError on all ranks if one of them sees less free space than `num_bytes`, what all ranks write
    together, where `folder` is to be."""
    require_space(folder, num_bytes, min(ranks.gather(free_bytes(folder))))


def write_shares(
    folder: Path,
    blocks: Iterable[Block],
    ranks: Ranks,
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes this rank's blocks into the checkpoint `folder`, in files of at most `max_bytes`, and on the
    rank that answers the index of all. All ranks must call it together. Raises OSError on all ranks if one
    can't write its share."""
    shares = folder / SHARES
    shares.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, ShareFile] = {}
    for number, contents in enumerate(_in_step(file_contents(blocks, max_bytes), ranks), start=1):
        written = [block for block in contents if block.is_written]
        place = shares / f"{number:05d}"
        _write_round(place, written, ranks)
        shapes |= {block.name: block.shape for block in written}
        for file in place.glob(f"shard-{ranks.number + 1:05d}-*"):
            places = {block.name: block.place for block in written}
            files[str(file.relative_to(shares))] = ShareFile(file.stat().st_size, _sha256(file), places)
    all_shapes: dict[str, tuple[int, ...]] = {}
    all_files: dict[str, ShareFile] = {}
    for of_rank in ranks.gather((shapes, files)):
        all_shapes |= of_rank[0]
        all_files |= of_rank[1]
    fault: OSError | None = None
    try:
        if ranks.context.answers:
            ShareIndex(dict(sorted(all_shapes.items())), dict(sorted(all_files.items()))).write(folder)
    except OSError as error:
        fault = error
    ranks.raise_any(fault)


def _in_step(contents: Iterator[list[Block]], ranks: Ranks) -> Iterator[list[Block]]:
    """This rank's blocks of each file, as many times as the rank with the most files has some."""
    while True:
        of_file = next(contents, [])
        if not any(ranks.gather(bool(of_file))):
            return
        yield of_file


def _write_round(folder: Path, blocks: Sequence[Block], ranks: Ranks) -> None:
    """Writes one file on each rank that has blocks."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    arguments: dict[str, Any] = {"storage_writer": writer, "planner": _Planner(blocks)}
    with warnings.catch_warnings():
        # torch says that one process saves alone, which is so.
        warnings.simplefilter("ignore", UserWarning)
        try:
            dcp.save({}, process_group=ranks.group, no_dist=ranks.is_one, **arguments)
        except dcp.CheckpointException as fault:
            first, *_ = (error for error, _ in fault.failures.values())
            if isinstance(first, OSError):
                raise OSError(first.errno, first.strerror, str(folder)) from fault
            raise OSError(f"{folder}: {first_line(first)}") from fault


class _Planner(SavePlanner):
    """Has a rank write its blocks, and nothing of what others have."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = {block.name: block for block in blocks}
        assert len(self._blocks) == len(blocks), "a file holds one block of a tensor"

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None: ...

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(block) for block in self._blocks.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._blocks[write_item.index.fqn].values.detach().contiguous()


def _item(block: Block) -> WriteItem:
    offsets = torch.Size(block.offsets)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, block.values.shape),
        properties=TensorProperties.create_from_tensor(block.values),
        size=torch.Size(block.shape),
    )
    return WriteItem(MetadataIndex(block.name, offsets), WriteItemType.SHARD, tensor_data=data)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
