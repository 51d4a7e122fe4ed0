"""Threads for calls: a pool that is dropped leaves none behind."""

import asyncio
import threading

from turnwise.runtime.threads import DaemonPool


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
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
