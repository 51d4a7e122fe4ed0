"""Threads for calls: a pool that is dropped leaves none behind."""

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import Future

from turnwise.runtime import threads
from turnwise.runtime.threads import DaemonPool, DaemonThread


def test_the_threads_of_a_dropped_pool_end():
    pool = DaemonPool("test_threads")

    async def three_at_once(pool):
        together = threading.Barrier(3)
        await asyncio.gather(*(pool.call(together.wait) for _ in range(3)))

    asyncio.run(three_at_once(pool))
    threads = [thread for thread in threading.enumerate() if thread.name == "test_threads"]
    assert len(threads) == 3
    del pool
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_threads_that_wait_for_others_give_their_core_away():
    code = "import os, turnwise; print(os.environ['GOMP_SPINCOUNT'])"
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | own, capture_output=True, text=True, check=True
        ).stdout
        for own in ({"GOMP_SPINCOUNT": "7"}, {})
    ]
    assert said[0] == "7\n" and int(said[1]) <= 10_000


def test_an_interrupt_while_a_result_is_handed_over_ends_no_thread(monkeypatch):
    class Interrupted(Future):
        def set_result(self, result):
            super().set_result(result)
            raise SystemExit

    monkeypatch.setattr(threads, "Future", Interrupted)
    thread = DaemonThread("test_threads")
    assert [thread.start(max, n, 2).result(timeout=10) for n in (1, 3)] == [2, 3]
    thread.end()
    thread.join(60)
