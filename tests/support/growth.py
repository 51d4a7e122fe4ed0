"""Whether work grows with its input in proportion: no test asserts seconds, since machines differ."""

import time
from collections.abc import Callable

PARTS = 8
MOST_GROWTH = 28.0
"""Work in proportion takes 8 times as long for 8 times as much; work that grows with the square 64 times."""
SHORTEST_S = 0.002
"""A part that took less counts as this much: below it the clock and the machine's other work are measured."""


def assert_linear(
    work: Callable[[int], object], size: int, label: object = "", most_growth: float = MOST_GROWTH
) -> None:
    """Does `work(size)`, and `work(size / 8)`, and fails if this thread's CPU time grew by more than
    `most_growth`. What fails is measured anew, and the best times count: other work on the machine empties
    the caches."""
    part_s: list[float] = []
    whole_s: list[float] = []
    for _ in range(4):
        part_s.append(_cpu_s(work, size // PARTS))
        whole_s.append(_cpu_s(work, size))
        growth = min(whole_s) / max(min(part_s), SHORTEST_S)
        if growth <= most_growth:
            return
    raise AssertionError(f"{PARTS} times the input took {growth:.0f} times the CPU time: {label!r}")


def _cpu_s(work: Callable[[int], object], size: int) -> float:
    started = time.thread_time()
    work(size)
    return time.thread_time() - started
