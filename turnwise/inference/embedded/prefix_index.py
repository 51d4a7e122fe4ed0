"""Finds the slot whose context begins most like a new one."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from turnwise.types import IntArray


class PrefixIndex:
    """Contexts of slots, sorted by their bytes, so that the context with the longest common prefix is a neighbour.

    Finding costs a binary search, however many slots there are and however long their contexts.

    >>> index = PrefixIndex()
    >>> index.put(0, np.array([5, 6, 7]))
    >>> index.put(1, np.array([8, 9]))
    >>> index.put(2, np.array([5, 6, 9]))
    >>> index.neighbours(3, np.array([5, 6, 8]))
    [0, 2]
    """

    def __init__(self) -> None:
        self._keys: list[tuple[bytes, int]] = []
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._key_of

    def put(self, slot: int, context_ids: IntArray) -> None:
        """Sets the ids that the slot's context begins with."""
        self.discard(slot)
        key = _key(context_ids)
        self._key_of[slot] = key
        insort(self._keys, (key, slot))

    def discard(self, slot: int) -> None:
        """Removes the slot's context."""
        key = self._key_of.pop(slot, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, (key, slot))]

    def clear(self) -> None:
        self._keys.clear()
        self._key_of.clear()

    def neighbours(self, slot: int, context_ids: IntArray) -> list[int]:
        """At most two other slots: no context has more tokens in common with this one of `slot` than one of theirs."""
        place = bisect_left(self._keys, (_key(context_ids), slot))
        around = self._keys[max(place - 1, 0) : place + 2]
        others = [other for _, other in around if other != slot]
        return others[:2]


def _key(context_ids: IntArray) -> bytes:
    return context_ids.astype(np.int32).tobytes()
