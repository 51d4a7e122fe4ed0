"""What a strategy writes of which each rank holds a share: a checkpoint by shares, a plain folder, or both
(docs/design/checkpoints.md). All ranks must call these functions together."""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from turnwise.model_files.share_index import SHARES
from turnwise.models.consolidate import write_plain_weights, write_settings
from turnwise.models.shares import MAX_FILE_BYTES, Shares
from turnwise.training.ranks import Ranks
from turnwise.training.share_writer import Block, require_space_for_all, write_shares
from turnwise.training.state import write_shared_state

_BYTES = 4
"""Bytes of a number: weights are fp32."""


def write_training(
    folder: Path,
    ranks: Ranks,
    blocks: Iterable[Block],
    state: Mapping[str, Any],
    steps: Mapping[str, float] | None,
    num_bytes: int,
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the blocks of all ranks, and beside them a `trainer_state` with AdamW's `steps` of each
    parameter. `num_bytes` is about what the ranks write together. Raises OSError on all ranks if one can't
    write."""
    require_space_for_all(folder, num_bytes, ranks)
    write_shares(folder, blocks, ranks, max_bytes)
    on_all(ranks, lambda: _if_answers(ranks, lambda: write_shared_state(folder, state, steps)))


def write_model(
    folder: Path,
    ranks: Ranks,
    blocks: Iterable[Block],
    model: PreTrainedModel,
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a plain folder with the weights in `blocks` and the settings of `model`, without a whole model
    in one process. Raises OSError on all ranks if one can't write."""
    write_shares(folder, blocks, ranks, max_bytes)
    add_settings(folder, ranks, model)
    add_weights(folder, ranks, max_bytes)
    on_all(ranks, lambda: _if_answers(ranks, lambda: shutil.rmtree(folder / SHARES)))


def add_settings(folder: Path, ranks: Ranks, model: PreTrainedModel) -> None:
    """Writes what a plain folder has beside its weights."""
    on_all(ranks, lambda: _if_answers(ranks, lambda: write_settings(model, folder)))


def add_weights(folder: Path, ranks: Ranks, max_bytes: int = MAX_FILE_BYTES) -> None:
    """Writes whole tensors beside the shares of a folder, each rank some of the files. Raises OSError on all
    ranks if one can't."""
    shares = Shares(folder)
    num_bytes = sum(_BYTES * math.prod(shares.shape(name)) for name in shares.weights)
    require_space_for_all(folder, num_bytes, ranks)
    size = ranks.context.world_size
    on_all(ranks, lambda: write_plain_weights(shares, folder, ranks.number, size, max_bytes))


def on_all(ranks: Ranks, write: Callable[[], object]) -> None:
    """Calls `write` on each rank, and waits for all. Raises OSError on all ranks if one raises it."""
    fault: OSError | None = None
    try:
        write()
    except OSError as error:
        fault = error
    ranks.raise_any(fault)


def _if_answers(ranks: Ranks, write: Callable[[], object]) -> None:
    if ranks.context.answers:
        write()
