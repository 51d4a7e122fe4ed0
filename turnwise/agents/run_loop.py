"""Calls onto a run's event loop from other threads, for agents that play in a thread of their own."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from turnwise.errors import BlockingFault

T = TypeVar("T")


class RunLoop:
    """The event loop that it is made on. Servers, tools and their deadlines live there.

    >>> async def add(a, b):
    ...     return a + b
    >>> async def play():
    ...     run_loop = RunLoop()
    ...     return await asyncio.to_thread(run_loop.blocking, lambda: add(1, 2), "a call", "await it")
    >>> asyncio.run(play())
    3
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def awaited(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs on this loop, for callers on any loop."""
        if asyncio.get_running_loop() is self._loop:
            return await call
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def blocking(self, make: Callable[[], Coroutine[Any, Any, T]], call: str, advice: str) -> T:
        """The result of the coroutine that `make` returns. Blocks the calling thread, which must not be the
        loop's own: there it raises BlockingFault, since the loop would wait for itself. `call` and `advice`
        are for its message."""
        if asyncio._get_running_loop() is self._loop:
            raise BlockingFault(
                f"{call} blocks the run's event loop, which is to answer it: {advice}, or call it in a thread"
            )
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result()
