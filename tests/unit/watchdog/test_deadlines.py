"""Many waits at once."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from turnwise.errors import DeadlineError
from turnwise.runtime.watchdog import Watchdog


def test_ten_thousand_waits_leave_nothing():
    watchdog, waits = Watchdog(), []

    async def wait(started, go):
        made = watchdog.waiting("a test", "a word", 60.0, "nothing")
        waits.append(weakref.ref(made))
        async with made:
            started.release()
            await go.wait()

    async def everybody():
        started, go = asyncio.Semaphore(0), asyncio.Event()
        tasks = [asyncio.create_task(wait(started, go)) for _ in range(10_000)]
        for _ in tasks:
            await started.acquire()
        go.set()
        await asyncio.gather(*tasks)
        del tasks
        gc.collect()
        return sum(wait() is not None for wait in waits)

    assert asyncio.run(everybody()) == 0
    assert not watchdog.of_task


def test_of_many_waits_those_end_that_are_due_and_a_new_loop_has_timers_of_its_own():
    watchdog = Watchdog()

    async def wait(is_long):
        async with watchdog.waiting("a test", "a word", 0.05, "nothing"):
            await (asyncio.Event().wait() if is_long else asyncio.sleep(0))

    for _ in range(2):

        async def everybody():
            return await asyncio.gather(
                *(wait(number % 3 == 0) for number in range(30)), return_exceptions=True
            )

        outcomes = asyncio.run(everybody())
        assert [isinstance(outcome, DeadlineError) for outcome in outcomes] == [
            number % 3 == 0 for number in range(30)
        ]


@pytest.mark.parametrize(("pause_s", "timeout_s"), [(0.0, 0.1), (1.5, 2.0)])
def test_a_wait_that_begins_while_others_are_due_has_its_whole_time(pause_s, timeout_s):
    watchdog = Watchdog()

    async def wait(word_comes):
        async with watchdog.waiting("a test", "a word", timeout_s, "nothing"):
            await word_comes.wait()

    async def both():
        word = asyncio.Event()
        first = asyncio.create_task(wait(asyncio.Event()))
        await asyncio.sleep(pause_s)
        second = asyncio.create_task(wait(word))
        with pytest.raises(DeadlineError):
            await first
        if pause_s:
            word.set()
            await second
        else:
            with pytest.raises(DeadlineError):
                await second

    asyncio.run(both())


def test_waits_end_in_the_order_of_their_deadlines_whichever_began_first():
    watchdog, ended = Watchdog(), []

    async def wait(timeout_s):
        try:
            async with watchdog.waiting("a test", "a word", timeout_s, "nothing"):
                await asyncio.Event().wait()
        except DeadlineError:
            ended.append(timeout_s)

    async def everybody():
        async with watchdog.waiting("a test", "the others", 60.0, "nothing"):
            await asyncio.gather(*map(wait, (0.15, 0.05, 0.1)))

    asyncio.run(everybody())
    assert ended == [0.05, 0.1, 0.15]
