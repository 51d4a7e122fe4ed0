"""What a runner is: the model behind the engine, one forward pass at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from turnwise.types import IntArray


@dataclass(frozen=True, slots=True)
class Step:
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
    token_ids: IntArray
    """[N]"""

    @classmethod
    def pack(cls, ids: IntArray, slots: IntArray, starts: IntArray, counts: IntArray) -> Step:
        """The step over `counts` tokens from `starts` on of the contexts `ids` [S, L] in `slots`.

        >>> ids = np.array([[5, 6, 7], [8, 9, 0]])
        >>> step = Step.pack(ids, slots=np.array([0, 1]), starts=np.array([2, 0]), counts=np.array([1, 2]))
        >>> step.token_ids, step.positions, step.last_tokens
        (array([7, 8, 9]), array([2, 0, 1]), array([0, 2]))
        """
        rows = np.repeat(np.arange(len(slots)), counts)
        columns = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        return cls(slots, starts, counts, rows, columns, ids[slots[rows], starts[rows] + columns])

    @property
    def positions(self) -> IntArray:
        """[N]"""
        return self.starts[self.rows] + self.columns

    @property
    def last_tokens(self) -> IntArray:
        """[B] index in the pack of each row's last token."""
        return np.cumsum(self.counts) - 1


class Runner(Protocol):
    """Computes logits and keeps keys and values by slot. Called under `torch.inference_mode`."""

    max_slots: int
    """Sequences of the greatest length that the memory bound has room for."""

    def reserve(self, num_slots: int, length: int) -> None:
        """Makes room for at least this many slots and tokens a slot, keeping what is cached."""
        ...

    def usable_prefix(self, slot: int, num_cached: int, num_common: int) -> int:
        """How many of the `num_common` tokens that the next context shares with the slot's `num_cached` can stay."""
        ...

    def forward(self, step: Step) -> Tensor:
        """Logits [B, V] float32 after each row's last token."""
        ...

    def refresh(self) -> None:
        """The weights have changed or moved; what is cached is no longer used."""
        ...

    def free(self) -> None:
        """Gives the memory of the cache back."""
        ...
