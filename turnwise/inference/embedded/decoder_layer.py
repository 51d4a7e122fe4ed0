"""A decoder layer's torch operations between matrix products. Rows with similarly many new tokens share an
attention call."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from turnwise.inference.embedded.cache import KVCache
from turnwise.inference.embedded.runner import PackedStep
from turnwise.models.fused import HeadShape
from turnwise.types import IntArray

_DECODE_SPREAD = 2
"""Decoding rows attend to the cache in place, together with the idle slots between them, if they span at most
this many slots per row: reading an idle slot is cheaper than copying the rows' slots."""
_PIECE = 512  # queries of one row that are computed together; a piece only reads the keys up to its own end
_BLOCK = 2**22  # most pairs of queries and keys of one attention call, padding and masked pairs included
_STORED_MASK = 2**20  # most pairs of a call whose mask is kept for all layers instead of computed in each


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """One attention call: a padded block of `R` rows × `width` queries over `length` keys. A row of the block
    holds new tokens of one row of the step, or belongs to an idle slot in between and its result is
    unused."""

    slots: slice | Tensor
    """The rows' slots in the cache; a slice if they are adjacent, so that nothing needs copying."""
    num_rows: int
    width: int
    length: int
    # [n] indices of the block's tokens among the packed ones; None = all of them, in order
    tokens: Tensor | None
    places: Tensor | None  # [n] their places in the flat block [R · width]; None = place i holds token i
    positions: Tensor  # [R, 1, width, 1] each query's position in its context; 0 for padding
    stored_mask: Tensor | None  # the mask, if it is small enough to keep

    def mask(self, dtype: torch.dtype) -> Tensor:
        """The additive attention mask [R, 1, width, length]: a query sees the keys up to its own position."""
        if self.stored_mask is not None:
            return self.stored_mask
        is_ahead = torch.arange(self.length, device=self.positions.device) > self.positions
        mask = torch.zeros(is_ahead.shape, dtype=dtype, device=is_ahead.device)
        return mask.masked_fill_(is_ahead, -torch.inf)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces, each of consecutive tokens of one row of the step, as arrays with one entry per piece."""

    slots: IntArray
    tokens: IntArray
    """The index of each piece's first token among the packed ones."""
    starts: IntArray
    """The position of each piece's first token in its context."""
    counts: IntArray
    """The number of each piece's tokens."""

    def __getitem__(self, index: IntArray) -> "_Pieces":
        return _Pieces(
            self.slots[index],
            self.tokens[index],
            self.starts[index],
            self.counts[index],
        )


def _grouped(pieces: _Pieces) -> Iterator[_Pieces]:
    """Groups rows by the power of two at or above their number of new tokens. Each piece of a long row is its
    own group."""
    exponents = np.ceil(np.log2(pieces.counts)).astype(np.int64)
    for exponent in np.unique(exponents):
        alike = pieces[np.flatnonzero(exponents == exponent)]
        if 2**exponent > _PIECE:
            yield from _cut(alike)
            continue
        num_queries = int(alike.counts.max())
        num_keys = int((alike.starts + alike.counts).max())
        num_rows = max(_BLOCK // (num_queries * num_keys), 1)
        for begin in range(0, len(alike.slots), num_rows):
            end = min(begin + num_rows, len(alike.slots))
            yield alike[np.arange(begin, end)]


def _cut(pieces: _Pieces) -> Iterator[_Pieces]:
    for index in range(len(pieces.slots)):
        row = pieces[np.array([index])]
        for begin in range(0, int(row.counts[0]), _PIECE):
            yield _Pieces(
                row.slots,
                row.tokens + begin,
                row.starts + begin,
                np.minimum(row.counts - begin, _PIECE),
            )


def _group(
    pieces: _Pieces,
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionGroup:
    slots = pieces.slots
    counts = pieces.counts
    width = int(counts.max())
    length = int((pieces.starts + counts).max())
    first = int(slots[0])
    spread = int(slots[-1] - slots[0]) + 1
    is_dense = spread == len(slots) or (width == 1 and spread <= _DECODE_SPREAD * len(slots))
    cache_slots: slice | Tensor
    if is_dense:
        cache_slots = slice(first, first + spread)
        row_of_slot = slots - first
        num_rows = spread
    else:
        cache_slots = torch.from_numpy(slots).to(device)
        row_of_slot = np.arange(len(slots))
        num_rows = len(slots)

    owners = np.repeat(np.arange(len(slots)), counts)  # of each token: its index in `slots`
    first_tokens = np.cumsum(counts) - counts
    columns = np.arange(len(owners)) - np.repeat(first_tokens, counts)
    tokens = pieces.tokens[owners] + columns
    places = row_of_slot[owners] * width + columns
    positions = np.zeros(num_rows * width, np.int64)
    positions[places] = pieces.starts[owners] + columns
    group = AttentionGroup(
        slots=cache_slots,
        num_rows=num_rows,
        width=width,
        length=length,
        tokens=_index(tokens, num_tokens, device),
        places=_index(places, num_rows * width, device),
        positions=torch.from_numpy(positions).to(device).view(num_rows, 1, width, 1),
        stored_mask=None,
    )
    if num_rows * width * length > _STORED_MASK:
        return group
    return replace(group, stored_mask=group.mask(dtype))


def _index(indices: IntArray, size: int, device: torch.device) -> Tensor | None:
    """The indices on the device; None if they are all `size` of them, in order."""
    return None if len(indices) == size else torch.from_numpy(indices).to(device)


def _attend_group(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    group: AttentionGroup,
    scale: float,
) -> Tensor:
    num_heads, head_dim = queries.shape[1:]
    block = queries
    if group.places is not None:
        block = queries.new_zeros(group.num_rows * group.width, num_heads, head_dim)
        block[group.places] = queries
    keys = keys[group.slots, :, : group.length]
    values = values[group.slots, :, : group.length]
    mask = group.mask(queries.dtype)
    if group.width == 1:
        # The query heads of one key head count as queries of one head, so the kernel needs no repeated keys.
        block = block.view(group.num_rows, keys.shape[1], -1, head_dim)
        mixed = F.scaled_dot_product_attention(block, keys, values, attn_mask=mask, scale=scale)
    else:
        block = block.view(group.num_rows, group.width, num_heads, head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            block,
            keys,
            values,
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        mixed = mixed.transpose(1, 2)
    mixed = mixed.reshape(group.num_rows * group.width, num_heads * head_dim)
    return mixed if group.places is None else mixed[group.places]


class TorchOps:
    """The operations on the `N` packed tokens of a `step`. The cache must have room for the step's slots.
    `rotary` [length, 2, head_dim] holds cosines and sines by position; sines of the first half of `head_dim`
    are negated."""

    def __init__(self, step: PackedStep, shape: HeadShape, cache: KVCache, rotary: Tensor) -> None:
        device = rotary.device
        self._shape = shape
        self._cache = cache
        self._slots = torch.from_numpy(step.slots[step.rows]).to(device)
        self._positions = torch.from_numpy(step.positions).to(device)
        self._cosines, self._sines = rotary.index_select(0, self._positions)[:, :, None].unbind(1)
        num_tokens = len(step.token_ids)
        first_tokens = np.cumsum(step.counts) - step.counts
        pieces = _Pieces(step.slots, first_tokens, step.starts, step.counts)
        groups = [pieces] if num_tokens == len(step.slots) else _grouped(pieces)
        self._groups = [_group(group, num_tokens, device, rotary.dtype) for group in groups]

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / √(mean x² + eps) · weight over the last dimension (Zhang & Sennrich 2019)."""
        if x.is_cuda or x.dtype != torch.float32:
            return F.rms_norm(x, x.shape[-1:], eps=self._shape.eps) * weight
        # On a CPU, torch's own function makes more passes over x than these three.
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean_square = size.square_().mul_(1 / x.shape[-1])
        scale = mean_square.add_(self._shape.eps).rsqrt_()
        return (x * scale).mul_(weight)

    def place_heads(self, layer: int, qkv: Tensor, norms: Tensor | None) -> Tensor:
        """Returns the queries [N, heads, head_dim] of `qkv` [N, (heads + 2 kv_heads) · head_dim], and writes
        its keys and values to the cache. Queries and keys are normed by `norms` [heads + kv_heads, head_dim],
        if given, and rotated (Su et al. 2021)."""
        shape = self._shape
        num_rotated = shape.num_heads + shape.num_kv_heads
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        rotated = heads[:, :num_rotated]
        if norms is not None:
            rotated = self.rms_norm(rotated, norms)
        first, second = rotated.chunk(2, -1)
        swapped = torch.cat((second, first), -1)
        rotated = (rotated * self._cosines).addcmul_(swapped, self._sines)
        self._cache.keys[layer][self._slots, :, self._positions] = rotated[:, shape.num_heads :]
        self._cache.values[layer][self._slots, :, self._positions] = heads[:, num_rotated:]
        return rotated[:, : shape.num_heads]

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """The attention output [N, heads · head_dim]: each token attends to its slot's cache up to its own
        position."""
        keys = self._cache.keys[layer]
        values = self._cache.values[layer]
        scale = self._shape.scale
        if len(self._groups) == 1 and self._groups[0].tokens is None:
            return _attend_group(queries, keys, values, self._groups[0], scale)
        output = torch.empty_like(queries).flatten(1)
        for group in self._groups:
            output[group.tokens] = _attend_group(queries[group.tokens], keys, values, group, scale)
        return output

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up [N, size], where gate and up are the halves of `gate_up` [N, 2 · size]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
