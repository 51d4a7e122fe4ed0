"""Python's collector of cycles while episodes are played."""

from __future__ import annotations

import gc

import pytest

from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


async def threshold(fault=None):
    if fault:
        raise fault
    return gc.get_threshold()


@pytest.mark.parametrize(
    ("before", "within"),
    [((700, 10, 10), (50_000, 20, 10)), ((100_000, 5, 99), (100_000, 20, 99)), ((0, 10, 10), (0, 10, 10))],
)
def test_it_looks_less_often_and_as_before_afterwards(before, within):
    gc.set_threshold(*before)
    with WatchedRunner(Watchdog()) as runner:
        assert runner.run(threshold()) == within
        assert gc.get_threshold() == before
        with pytest.raises(KeyError):
            runner.run(threshold(KeyError("x")))
        assert gc.get_threshold() == before


async def set_by_somebody():
    gc.set_threshold(123, 4, 5)


def test_what_somebody_sets_meanwhile_stays():
    with WatchedRunner(Watchdog()) as runner:
        runner.run(set_by_somebody())
        assert gc.get_threshold() == (123, 4, 5)
