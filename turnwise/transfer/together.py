"""Servers that receive weights as members of one group, in which each waits for all others."""

from contextlib import AsyncExitStack
from typing import Protocol, runtime_checkable

from turnwise.transfer.contracts import UpdatesWeights, WeightSource


@runtime_checkable
class ReceivedTogether(Protocol):
    """Weights that several servers receive together."""

    async def give_up(self, reason: str) -> None:
        """Ends the waits of those that have come for one that never comes: they raise LostWeightsError."""


async def receive(server: UpdatesWeights, weights: WeightSource) -> int:
    """The result of `server.receive(weights)`. If the server fails, those that receive together with it don't
    wait for it."""
    async with AsyncExitStack() as on_error:
        if isinstance(weights, ReceivedTogether):
            on_error.push_async_callback(weights.give_up, "a server that receives them too has failed")
        num_bytes = await server.receive(weights)
        on_error.pop_all()
    return num_bytes
