"""Starts dead replicas again, while the others serve their requests."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from turnwise.protocols import InferenceServer

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
WINDOW_S = 600.0
"""A replica that dies `MAX_DEATHS` times within these seconds isn't started again."""


class Restarts:
    """Starts replicas again. `start` ends a dead one and returns another on its devices; `admit` gives that
    one the current weights, and then requests. `now` gives seconds.

    A start that fails counts as a death."""

    def __init__(
        self,
        start: Callable[[InferenceServer], Awaitable[InferenceServer]],
        admit: Callable[[InferenceServer], Awaitable[None]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._admit = admit
        self._now = now
        self._deaths: dict[int, deque[float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers: dict[InferenceServer, int] = {}
        """A dead replica, or the one that has been started in its place → its number, until it serves."""

    @property
    def numbers(self) -> Collection[int]:
        """The numbers of the replicas that are being started again."""
        return self._numbers.values()

    def joined(self, server: InferenceServer) -> int | None:
        """Notes that a replica serves. Returns its number; None if it isn't one that was started again."""
        return self._numbers.pop(server, None)

    @property
    def is_busy(self) -> bool:
        """Whether a replica is being started or ended."""
        return bool(self._tasks)

    def begin(self, server: InferenceServer, replica: int) -> bool:
        """Notes the death of a replica, and begins to start it again. Returns False if it has died too
        often, and begins to end it."""
        may_start = self._may_start(replica)
        if may_start:
            self._numbers[server] = replica
        beginning = self._restart(server, replica) if may_start else _end(server)
        task = asyncio.get_running_loop().create_task(
            beginning, name=f"restart of inference replica {replica}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return may_start

    async def next_end(self) -> None:
        """Waits until one of the running starts has ended. Returns at once if none runs."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Gives up the running starts."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _may_start(self, replica: int) -> bool:
        """Notes a death. Returns whether the replica has died less often than ends its restarts."""
        now = self._now()
        deaths = self._deaths.setdefault(replica, deque(maxlen=MAX_DEATHS))
        deaths.append(now)
        return len(deaths) < MAX_DEATHS or now - deaths[0] > WINDOW_S

    async def _restart(self, server: InferenceServer, replica: int) -> None:
        started_s = self._now()
        is_back = False
        while not is_back:
            try:
                new = await self._start(server)
                self._numbers.pop(server, None)
                self._numbers[new] = replica
                server = new
                await self._admit(server)
                is_back = True
            except asyncio.CancelledError:
                await server.close()
                raise
            except Exception as error:  # boundary: a start can fail in any way
                logger.error("Inference replica %d could not be started again: %r", replica, error)
                if not self._may_start(replica):
                    logger.error("Inference replica %d has died too often and stays dead.", replica)
                    self._numbers.pop(server, None)
                    await _end(server)
                    return
        logger.warning(
            "Inference replica %d serves again, with the current weights, after %.1f s.",
            replica,
            self._now() - started_s,
        )


async def _end(server: InferenceServer) -> None:
    """Ends a replica that stays dead: an overdue one, or one that couldn't be given the weights, would keep
    its devices."""
    with suppress(Exception):  # boundary: nobody needs a replica that can't even close
        await server.close()
