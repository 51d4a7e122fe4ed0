"""A small run of `benchmarks/tool_conversations.py`: conversations with tools keep their tokens."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_conversations_with_tools_keep_their_tokens(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import tool_conversations as figures

    shapes = figures.shapes()
    assert len(shapes) == 12
    found = np.array(
        [asyncio.run(figures.converse(shapes[number % 12], number)) for number in range(24)]
    ).sum(0)
    turns, not_reencodable, *faults = found.tolist()
    assert turns > 48 and not_reencodable > turns / 2 and faults == [0, 0, 0]
