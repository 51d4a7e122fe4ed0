"""Slots that read out of each other hold what they would hold by themselves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from turnwise.models.cpu.shared_prefixes import SharedPrefixes

SLOTS, LENGTH = 5, 64
ACTIONS = st.lists(
    st.tuples(
        st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), st.integers(0, LENGTH), st.integers(1, LENGTH)
    ),
    max_size=40,
)


class Cache:
    """A cache kept twice: as slots share it, and in each slot by itself."""

    def __init__(self):
        self.shared = np.zeros((SLOTS, LENGTH), np.int64)
        self.own = self.shared.copy()
        self.cached = np.zeros(SLOTS, np.int64)
        self.num_written = 0
        self.prefixes = SharedPrefixes(self.copy)
        self.prefixes.reserve(SLOTS)

    def copy(self, source, target, start, stop):
        assert start < stop
        self.shared[target, start:stop] = self.shared[source, start:stop]

    def restart(self, slot, kept, stop):
        """Another context in the slot, of which it has cached the beginning."""
        kept = min(kept, int(self.cached[slot]))
        self.prefixes.keep(slot, kept)
        self.cached[slot] = kept
        self.write(slot, stop)

    def write(self, slot, stop):
        start = int(self.cached[slot])
        for place in range(start, stop):
            self.num_written += 1
            self.shared[slot, place] = self.own[slot, place] = self.num_written
        self.cached[slot] = max(start, stop)

    def take(self, source, target, stop):
        """A context that begins like that of another slot, as far as that is cached."""
        start, stop = int(self.cached[target]), min(stop, int(self.cached[source]))
        is_alike = (self.own[source, :start] == self.own[target, :start]).all()
        if source != target and start < stop and is_alike:
            self.prefixes.share(source, target, start, stop)
            self.own[target, start:stop] = self.own[source, start:stop]
            self.cached[target] = stop

    def check(self):
        bases, splits = self.prefixes.bases, self.prefixes.splits
        assert (splits % 8 == 0).all() and (splits <= self.cached).all()
        assert (splits[bases[splits > 0]] == 0).all(), "a base reads from itself"
        for slot in range(SLOTS):
            read = np.where(np.arange(LENGTH) < splits[slot], self.shared[bases[slot]], self.shared[slot])
            assert (read == self.own[slot])[: self.cached[slot]].all()


@given(actions=ACTIONS)
@settings(max_examples=300, deadline=None)
def test_whoever_writes_what_every_slot_reads_its_own_context(actions):
    cache = Cache()
    for number, (slot, other, first, second) in enumerate(actions):
        if number % 2:
            cache.restart(slot, first, 0)
            cache.take(other, slot, second)
        cache.write(slot, min(int(cache.cached[slot]) + second // 8, LENGTH))
        cache.check()


def test_nothing_is_copied_while_siblings_play_on():
    cache = Cache()
    cache.write(0, 40)
    for sibling in range(1, SLOTS):
        cache.take(0, sibling, 40)
    cache.copy = None
    for sibling in range(SLOTS):
        cache.write(sibling, 60)
        cache.prefixes.keep(sibling, 60)
    cache.check()
    assert cache.prefixes.bases.tolist() == [0] * SLOTS and cache.prefixes.splits.tolist() == [
        0,
        40,
        40,
        40,
        40,
    ]


def test_new_weights_end_all_sharing_and_slots_may_be_more():
    cache = Cache()
    cache.write(0, 40)
    cache.take(0, 1, 40)
    cache.prefixes.clear()
    cache.prefixes.reserve(SLOTS + 2)
    assert cache.prefixes.bases.tolist() == list(range(SLOTS + 2)) and not cache.prefixes.splits.any()
