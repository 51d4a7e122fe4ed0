"""A run works although an event loop is running already."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.errors import DeadlineError
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog


def test_the_outer_loop_stands_still_and_goes_on():
    async def cell():
        loop, task, ticks = asyncio.get_running_loop(), asyncio.current_task(), []
        loop.call_soon(ticks.append, "outer")
        with WatchedRunner(Watchdog()) as runner:
            inner = [runner.run(asyncio.sleep(0, word)) for word in "ab"]
            assert ticks == []
            with pytest.raises(ZeroDivisionError):
                runner.run(failing())
        assert asyncio.get_running_loop() is loop and asyncio.current_task() is task
        await asyncio.sleep(0)
        return inner, ticks

    async def failing():
        raise ZeroDivisionError

    inner, ticks = asyncio.run(cell())
    assert inner == ["a", "b"] and ticks == ["outer"]


def test_deadlines_hold_there_too():
    async def late(watchdog):
        async with watchdog.waiting("the test", "an answer", 0.01, "the number of seconds"):
            await asyncio.sleep(60.0)

    async def cell():
        with Watchdog() as watchdog, WatchedRunner(watchdog) as runner:
            runner.run(late(watchdog))

    with pytest.raises(DeadlineError, match=r"the test waited 0\.01 s for an answer"):
        asyncio.run(cell())
