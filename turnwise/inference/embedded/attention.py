"""Attention of packed new tokens over the cache: rows of similar lengths go through one kernel call together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from turnwise.inference.embedded.runner import Step
from turnwise.types import IntArray

_DECODE_SPREAD = 2
"""Decoding rows within a range of slots of up to this many times their number are computed in place, idle slots and all:
reading a slot once more is cheaper than copying the others."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows whose numbers of new tokens are similar: a padded block of `R` rows × `width` queries over `length` keys."""

    slots: slice | Tensor
    """The rows' slots in the cache; a slice where they lie together and nothing needs copying."""
    num_rows: int
    width: int
    length: int
    tokens: Tensor | None
    """[n] indices of the group's tokens in the pack; None = all of them, in order."""
    places: Tensor | None
    """[n] their places in the flat block [R · width]; None = place i holds token i."""
    mask: Tensor
    """bool [R, 1, width, length]: a query sees the keys at its own position and before. Padding sees key 0."""


def plan_attention(step: Step, device: torch.device) -> list[AttentionGroup]:
    """Groups the rows of a step: decoding rows, then the others by the power of two above their number of new tokens."""
    exponents = np.ceil(np.log2(step.counts)).astype(np.int64)
    kinds = np.unique(exponents)
    return [_group(step, np.flatnonzero(exponents == kind), device) for kind in kinds]


def attend(queries: Tensor, keys: Tensor, values: Tensor, groups: Sequence[AttentionGroup], scale: float) -> Tensor:
    """Attention output [N, heads · head_dim] of packed queries [N, heads, head_dim] over a layer's cache, causal per row."""
    if len(groups) == 1 and groups[0].tokens is None:
        return _attend_group(queries, keys, values, groups[0], scale)
    output = torch.empty_like(queries).flatten(1)
    for group in groups:
        output[group.tokens] = _attend_group(queries[group.tokens], keys, values, group, scale)
    return output


def _group(step: Step, rows: IntArray, device: torch.device) -> AttentionGroup:
    slots, counts = step.slots[rows], step.counts[rows]
    width, length = int(counts.max()), int((step.starts[rows] + counts).max())
    first, spread = int(slots[0]), int(slots[-1] - slots[0]) + 1
    in_place = spread == len(rows) or (width == 1 and spread <= _DECODE_SPREAD * len(rows))
    num_rows = spread if in_place else len(rows)
    row_places = slots - first if in_place else np.arange(len(rows))

    place_of_row = np.zeros(len(step.slots), np.int64)
    place_of_row[rows] = row_places
    is_member = np.zeros(len(step.slots), np.bool_)
    is_member[rows] = True
    tokens = np.flatnonzero(is_member[step.rows])
    places = place_of_row[step.rows[tokens]] * width + step.columns[tokens]

    positions = np.zeros(num_rows * width, np.int64)
    positions[places] = step.positions[tokens]
    query_positions = torch.from_numpy(positions).to(device).view(num_rows, 1, width, 1)
    return AttentionGroup(
        slots=slice(first, first + spread) if in_place else torch.from_numpy(slots).to(device),
        num_rows=num_rows,
        width=width,
        length=length,
        tokens=None if len(tokens) == len(step.token_ids) else torch.from_numpy(tokens).to(device),
        places=None if len(tokens) == num_rows * width else torch.from_numpy(places).to(device),
        mask=torch.arange(length, device=device) <= query_positions,
    )


def _attend_group(queries: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup, scale: float) -> Tensor:
    num_heads, head_dim = queries.shape[1:]
    block = queries
    if group.places is not None:
        block = queries.new_zeros(group.num_rows * group.width, num_heads, head_dim)
        block[group.places] = queries
    keys = keys[group.slots, :, : group.length]
    values = values[group.slots, :, : group.length]
    if group.width == 1:
        # The query heads of one key head are so many queries of one head: a kernel call without repeated keys.
        block = block.view(group.num_rows, keys.shape[1], -1, head_dim)
        mixed = F.scaled_dot_product_attention(block, keys, values, attn_mask=group.mask, scale=scale)
    else:
        block = block.view(group.num_rows, group.width, num_heads, head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(block, keys, values, attn_mask=group.mask, scale=scale, enable_gqa=True)
        mixed = mixed.transpose(1, 2)
    mixed = mixed.reshape(group.num_rows * group.width, num_heads * head_dim)
    return mixed if group.places is None else mixed[group.places]
