"""The protocol of a runner: the model behind the engine, one forward pass at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turnwise.types import IntArray


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One forward pass: `N` new tokens of `B` rows, packed row after row."""

    slots: IntArray
    """[B], ascending."""
    starts: IntArray
    """[B] tokens that each row's slot has cached: the position of its first new token."""
    counts: IntArray
    """[B] new tokens, at least 1."""
    rows: IntArray
    """[N] row of each token."""
    columns: IntArray
    """[N] index of each token among its row's new ones."""
    positions: IntArray
    """[N] place of each token in its context."""
    token_ids: IntArray
    """[N]"""
    ends_context: NDArray[np.bool_]
    """[B] whether the row's context is fully computed, so that its next token can be sampled."""
    last_tokens: IntArray
    """[C] index in the pack of the last token of each such row."""

    @classmethod
    def pack(cls, ids: IntArray, slots: IntArray, starts: IntArray, counts: IntArray, lengths: IntArray) -> PackedStep:
        """The step over `counts` tokens from `starts` on of the contexts `ids` [S, L] of `lengths` [B] in `slots`.

        >>> ids = np.array([[5, 6, 7], [8, 9, 4]])
        >>> step = PackedStep.pack(ids, np.array([0, 1]), np.array([2, 0]), counts=np.array([1, 2]), lengths=np.array([3, 3]))
        >>> step.token_ids, step.positions, step.last_tokens
        (array([7, 8, 9]), array([2, 0, 1]), array([0]))
        """
        if len(slots) == counts.sum():
            rows = last_tokens = np.arange(len(slots))
            columns, positions = np.zeros_like(rows), starts.copy()  # `starts` may be one field of many, with gaps
        else:
            rows, last_tokens = np.repeat(np.arange(len(slots)), counts), np.cumsum(counts) - 1
            columns = np.arange(len(rows)) - (last_tokens + 1 - counts)[rows]
            positions = starts[rows] + columns
        ends_context = starts + counts == lengths
        token_ids = ids[slots[rows], positions]
        return cls(slots, starts, counts, rows, columns, positions, token_ids, ends_context, last_tokens[ends_context])

    def tail(self) -> PackedStep:
        """The last token of each row whose context ends here, as rows of one token.

        >>> ids = np.array([[5, 6, 7], [8, 9, 4]])
        >>> step = PackedStep.pack(ids, np.array([0, 1]), np.array([2, 0]), counts=np.array([1, 3]), lengths=np.array([3, 3]))
        >>> step.tail().token_ids, step.tail().starts
        (array([7, 4]), array([2, 2]))
        """
        slots, positions = self.slots[self.ends_context], self.positions[self.last_tokens]
        order, ones = np.arange(len(slots)), np.ones_like(slots)
        token_ids = self.token_ids[self.last_tokens]
        return PackedStep(slots, positions, ones, order, order * 0, positions, token_ids, ones.astype(np.bool_), order)

    def cut(self, max_tokens: int) -> Iterator[PackedStep]:
        """Cuts the rows, in order, into steps of limited tokens; a longer row is a step of its own."""
        ends = np.cumsum(self.counts)
        first, num_before = 0, 0
        while first < len(ends):
            stop = max(int(np.searchsorted(ends, num_before + max_tokens, side="right")), first + 1)
            yield self._part(first, stop, num_before, int(ends[stop - 1]))
            first, num_before = stop, int(ends[stop - 1])

    def _part(self, first: int, stop: int, begin: int, end: int) -> PackedStep:
        """Rows `first` to `stop`, whose tokens are `begin` to `end`."""
        is_within = (self.last_tokens >= begin) & (self.last_tokens < end)
        return PackedStep(
            self.slots[first:stop],
            self.starts[first:stop],
            self.counts[first:stop],
            self.rows[begin:end] - first,
            self.columns[begin:end],
            self.positions[begin:end],
            self.token_ids[begin:end],
            self.ends_context[first:stop],
            self.last_tokens[is_within] - begin,
        )


class Runner(Protocol):
    """Computes logits and keeps keys and values by slot. Called under `torch.inference_mode`."""

    max_slots: int
    """Sequences of the greatest length that the memory bound has room for."""
    name: str
    """Name of the forward pass, for the table at the start of a run."""
    can_copy: bool
    """Whether one slot's cache can be copied to another."""

    def reserve(self, num_slots: int, length: int) -> None:
        """Makes room for at least this many slots and tokens a slot, keeping what is cached."""
        ...

    def usable_prefix(self, slot: int, num_cached: int, num_common: int) -> int:
        """Number of cached tokens that can stay, if the next context shares `num_common` of the slot's `num_cached`. The rest
        is overwritten."""
        ...

    def copy_prefix(self, source: int, target: int, start: int, stop: int) -> None:
        """Copies the cache of positions `start` to `stop` from slot `source` to slot `target`, if `can_copy`."""
        ...

    def forward(self, step: PackedStep) -> Tensor:
        """Logits [C, V] float32 after the contexts that end with this step."""
        ...

    def refresh(self) -> None:
        """Handles changed or moved weights; old caches are no longer used."""
        ...

    def free(self) -> None:
        """Gives the memory of the cache back."""
        ...
