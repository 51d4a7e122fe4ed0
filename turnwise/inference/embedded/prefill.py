"""Chooses the prompt tokens that each new row computes in a step: a chunk within a budget. Prefixes that
another slot has cached or is computing are copied instead."""

from bisect import bisect_left, insort

import numpy as np

from turnwise.inference.embedded.runner import Runner
from turnwise.inference.embedded.slot_arrays import Rows
from turnwise.inference.request import Request
from turnwise.models.cpu.build import LANES
from turnwise.types import IntArray


class PrefixIndex:
    """The contexts of slots, sorted by their bytes, so that the context with the longest common prefix is a
    neighbour. A lookup is one binary search.

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
        """Adds or replaces the slot's context."""
        self.discard(slot)
        key = _key(context_ids)
        self._key_of[slot] = key
        insort(self._keys, (key, slot))

    def discard(self, slot: int) -> None:
        """Removes the slot's context."""
        key = self._key_of.pop(slot, None)
        if key is not None:
            del self._keys[bisect_left(self._keys, (key, slot))]

    def neighbours(self, slot: int, context_ids: IntArray) -> list[int]:
        """At most two slots besides `slot`, among them the one whose context shares the longest prefix with
        `context_ids`."""
        place = bisect_left(self._keys, (_key(context_ids), slot))
        return [other for _, other in self._keys[max(place - 1, 0) : place + 2] if other != slot][:2]


def _key(context_ids: IntArray) -> bytes:
    return context_ids.astype(np.int32).tobytes()


_WORTH_SHARING = LANES
"""The least number of tokens worth sharing. The kernels read a shared prefix's keys in place by whole vectors
of tokens, and recomputing fewer tokens is as cheap as waiting for them and copying them."""


class Prefill:
    """The rows whose prompts aren't fully computed yet, in the order of their admission. A row copies a
    prefix that another slot has cached. If another row is still computing the prefix, the row waits and
    copies it in a later step: episodes of a group compute their common prompt once. A row that has begun to
    compute never waits, so no two rows wait for each other."""

    def __init__(self, rows: Rows, runner: Runner) -> None:
        self._rows = rows
        self._runner = runner
        self._index = PrefixIndex()
        self.slots: dict[int, None] = {}
        """The slots of the rows whose prompts aren't fully computed, in the order of admission."""

    def start(self, slot: int, request: Request, max_length: int) -> None:
        """Loads a request into a slot. A cached prefix that the new context repeats stays as far as the
        runner allows."""
        rows, context_ids = self._rows, request.context_ids
        num_cached = int(rows.state["cached"][slot])
        # The last token is always computed: sampling needs its logits.
        num_common = min(rows.common_prefix(slot, context_ids), num_cached, len(context_ids) - 1)
        self._index.discard(slot)
        rows.load(slot, request, self._runner.usable_prefix(slot, num_cached, num_common), max_length)
        self.slots[slot] = None

    def end_step(self) -> None:
        """Removes rows whose prompts are now computed. From the next step on they are decoded, one token per
        step."""
        state = self._rows.state
        for slot in [slot for slot in self.slots if state["cached"][slot] == state["length"][slot]]:
            state["num_new"][slot] = 1
            del self.slots[slot]

    def forget(self, slot: int) -> None:
        """Removes the slot. Must be called when its cache is lost."""
        self.slots.pop(slot, None)
        self._index.discard(slot)

    def forget_all(self) -> None:
        """Forgets which prefixes are cached, so that no slot copies them from now on."""
        self._index = PrefixIndex()

    def plan(self, budget: int) -> int:
        """Sets how many tokens each row computes next, at most `budget` together. Returns what is left of the
        budget."""
        for slot in self.slots:
            budget -= self.plan_row(slot, budget)
        return budget

    def plan_row(self, slot: int, budget: int) -> int:
        """Sets how many tokens of its prompt one row computes next, at most `budget`. Returns that number."""
        state = self._rows.state
        count = 0
        if budget and not (self._runner.can_copy and self._waits(slot)):
            count = min(int(state["length"][slot] - state["cached"][slot]), budget)
            if slot not in self._index:
                self._index.put(slot, self._rows.context(slot))
        state["num_new"][slot] = count
        return count

    def _waits(self, slot: int) -> bool:
        """Copies the longest prefix that another slot has cached. Returns whether the row should wait for a
        longer prefix."""
        rows, state, context_ids = self._rows, self._rows.state, self._rows.context(slot)
        start = int(state["cached"][slot])
        if len(context_ids) - start <= _WORTH_SHARING:
            return False
        is_promised = False
        for other in self._index.neighbours(slot, context_ids):
            # Comparing one token rules out most contexts, before all tokens are compared.
            needed = start + _WORTH_SHARING
            if needed >= len(context_ids):
                break
            if state["length"][other] < needed or rows.ids[other, needed - 1] != context_ids[needed - 1]:
                continue
            num_common = min(rows.common_prefix(other, context_ids), len(context_ids) - 1)
            stop = int(min(num_common, state["cached"][other]))
            if stop >= needed:
                self._runner.copy_prefix(other, slot, start, stop)
                state["cached"][slot] = start = stop
            is_promised |= other in self.slots and num_common - start >= _WORTH_SHARING
        return is_promised and slot not in self._index
