"""Lets slots read the beginning of their context from another slot of the KV cache."""

from collections.abc import Callable

import numpy as np

from turnwise.models.cpu.build import LANES
from turnwise.types import IntArray

Copy = Callable[[int, int, int, int], None]
"""`copy(source, target, start, stop)` copies the positions from `start` up to `stop` of slot `source` to slot
`target`."""


class SharedPrefixes:
    """Lets conversations with the same prompt store its keys and values once, so that a step fetches them
    from memory once.

    Slot `s` reads its positions below `splits[s]`, a multiple of `LANES`, from slot `bases[s]`, its base, and
    the others from itself. A base reads from no other slot. Before the base's positions are overwritten,
    `keep` copies them to a slot that reads them.

    >>> moved = []
    >>> prefixes = SharedPrefixes(lambda *what: moved.append(what))
    >>> prefixes.reserve(4)
    >>> prefixes.share(0, 1, 0, 20), prefixes.share(1, 2, 0, 20)
    (None, None)
    >>> prefixes.bases, prefixes.splits, moved
    (array([0, 0, 0, 3]), array([ 0, 16, 16,  0]), [(0, 1, 16, 20), (1, 2, 16, 20)])
    >>> prefixes.keep(0, 0)
    >>> prefixes.bases, prefixes.splits, moved[2:]
    (array([0, 1, 1, 3]), array([ 0,  0, 16,  0]), [(0, 1, 0, 16)])
    """

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self.bases: IntArray = np.zeros(0, np.int64)
        self.splits: IntArray = np.zeros(0, np.int64)

    def reserve(self, num_slots: int) -> None:
        """Makes room for at least this many slots. A new slot reads only from itself."""
        new_slots = np.arange(len(self.bases), max(num_slots, len(self.bases)))
        self.bases = np.concatenate((self.bases, new_slots))
        self.splits = np.concatenate((self.splits, np.zeros_like(new_slots)))

    def clear(self) -> None:
        """Makes every slot read from itself. What is cached now must not be read again."""
        self.bases = np.arange(len(self.bases))
        self.splits = np.zeros_like(self.splits)

    def share(self, source: int, target: int, start: int, stop: int) -> None:
        """Gives `target` the positions from `start` up to `stop` of `source`. Earlier positions are equal
        already."""
        split = int(self.splits[source])
        base = int(self.bases[source]) if split else source
        length = _whole_vectors(min(split or stop, stop))
        # A target that has `length` positions already keeps them. A slot that others read from must not read
        # from another.
        if length > start and not self._borrowers(target, longer_than=0):
            self._borrow(base, target, length)
            start = length
        if start < split:
            self._copy(base, target, start, min(split, stop))
        start = max(start, split)
        if start < stop:
            self._copy(source, target, start, stop)

    def keep(self, slot: int, num_tokens: int) -> None:
        """Keeps the first `num_tokens` positions of the slot, for itself and for slots that read from it. Its
        other positions may be overwritten from now on: another slot that reads them gets a copy."""
        split = int(self.splits[slot])
        if split > num_tokens:
            base = int(self.bases[slot])
            length = _whole_vectors(num_tokens)
            self._borrow(base, slot, length)
            if length < num_tokens:
                self._copy(base, slot, length, num_tokens)
        borrowers = self._borrowers(slot, longer_than=num_tokens)
        if not borrowers:
            return
        heir = max(borrowers, key=self.splits.__getitem__)
        self._copy(slot, heir, 0, int(self.splits[heir]))
        self._borrow(slot, heir, 0)
        for borrower in borrowers:
            self._borrow(heir, borrower, int(self.splits[borrower]))

    def _borrow(self, base: int, slot: int, split: int) -> None:
        self.splits[slot] = split
        self.bases[slot] = base if split else slot

    def _borrowers(self, base: int, longer_than: int) -> list[int]:
        borrows = (self.bases == base) & (self.splits > longer_than)
        return [int(slot) for slot in np.flatnonzero(borrows)]


def _whole_vectors(num_tokens: int) -> int:
    return num_tokens // LANES * LANES
