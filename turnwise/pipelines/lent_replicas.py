"""Inference replicas of an asynchronous run that make room for training in each step."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from turnwise.inference.server_manager import LLMServerManager
from turnwise.protocols import InferenceServer, MemoryKind, OnWeightUpdate
from turnwise.types import Metric


@dataclass
class LentReplicas:
    """The replicas that are `is_lent`: training uses their devices for a part of each step. The others keep
    sampling meanwhile.

    `on_weight_update` says what becomes of a leaving replica's requests: with `abort_continue` and
    `abort_restart` they move to the other replicas, else they end first. `admit` gives a replica the current
    weights, and then requests."""

    servers: LLMServerManager
    is_lent: Callable[[InferenceServer], bool]
    on_weight_update: OnWeightUpdate
    admit: Callable[[InferenceServer], Awaitable[None]]
    _lent_s: float = field(default=0.0, init=False)
    _left: dict[InferenceServer, float] = field(default_factory=dict, init=False)
    """Each replica that is away, and when it left."""

    async def leave(self, kinds: list[MemoryKind]) -> None:
        """Takes the replicas out and frees these kinds of their memory."""
        for server in self.servers.servers:
            if self.is_lent(server):
                await self.servers.lend(server, self.on_weight_update)
                await server.sleep(kinds)
                self._left[server] = time.monotonic()

    def measured(self) -> list[Metric]:
        """`time/lent_s`: the seconds that replicas were away since the last call, all together."""
        elapsed = self._lent_s
        self._lent_s = 0.0
        return [Metric("time/lent_s", elapsed, "sum")]

    async def come_back(self, kinds: list[MemoryKind]) -> None:
        """Gives the replicas their memory back, then the current weights, then requests. One that has died
        meanwhile is started again as any other."""

        async def restore(server: InferenceServer) -> None:
            await server.wake(kinds)
            await self.admit(server)

        for server in list(self._left):
            await self.servers.take_back(server, restore)
            self._lent_s += time.monotonic() - self._left.pop(server)
