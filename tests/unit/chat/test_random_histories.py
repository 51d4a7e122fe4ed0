"""Random histories of clients keep prefixes and masks, and don't depend on what arrives when. With
TURNWISE_FULL there are 10,000 of them."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from random_histories import SHAPES, checked, contexts, drawn_rounds, played, template_of

NUM_HISTORIES = 5
if os.environ.get("TURNWISE_FULL"):
    NUM_HISTORIES = -(-10_000 // len(SHAPES))


@pytest.mark.parametrize("shape", SHAPES)
def test_random_histories_keep_prefixes_and_masks_and_do_not_depend_on_arrival(shape: str) -> None:
    rng = random.Random(shape)
    template = template_of(shape)
    counts: Counter[str] = Counter()
    for number in range(NUM_HISTORIES):
        rounds = drawn_rounds(rng)
        first = played(rounds, number, template)
        checked(first)
        second = played(rounds, number + 1, template)
        checked(second)
        assert contexts(first) == contexts(second), f"history {number}"
        counts += first.counts + first.tree.counts
        counts["continued"] += sum(turn.parent is not None for turn in first.tree.turns)
    assert counts["continued"] and counts["answered"], counts
