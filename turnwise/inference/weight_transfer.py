"""Brings the trainer's weights to the inference servers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from turnwise.inference.server_manager import LLMServerManager
from turnwise.protocols import NamedTensors, OnWeightUpdate
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Metric


class ManagerTransfer:
    """Makes all replicas of a manager sample from the trainer's current weights: `protocols.WeightTransfer`.

    `weights` gives the trainer's named tensors, or something to await that does, as another process needs. Servers that read
    the trainer's own parameters only need to be suspended and resumed: they drop their caches and their reordered copies of the
    weights. The others receive the tensors; where these are several or in other processes, `share` makes a form that all can
    read. `take_turn` is called first, where roles take turns on a device. An update may take `timeout_s` seconds.
    """

    def __init__(
        self,
        servers: LLMServerManager,
        weights: Callable[[], NamedTensors | Awaitable[NamedTensors]],
        *,
        share: Callable[[NamedTensors], NamedTensors] | None = None,
        take_turn: Callable[[], Awaitable[None]] | None = None,
        on_weight_update: OnWeightUpdate = "finish",
        watchdog: Watchdog | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._servers = servers
        self._weights = weights
        self._share = share
        self._take_turn = take_turn
        self._on_weight_update = on_weight_update
        self._watchdog = watchdog or Watchdog()
        self._timeout_s = timeout_s

    async def update(self, version: int) -> list[Metric]:
        """Suspends the servers, transfers, bumps their version to `version` and resumes them.

        Raises:
            ModelError: a name or shape doesn't fit a server's model, or one of its tensors got no value.
            DeadlineError: past `timeout_s`.
        """
        started = time.perf_counter()
        waiter, awaited = "the pipeline", f"the weights of version {version} to reach the inference servers"
        async with self._watchdog.waiting(waiter, awaited, self._timeout_s, "deadlines.weights_s"):
            if self._take_turn is not None:
                await self._take_turn()
            weights = await self._fetch() if self._servers.info().needs_weights else None
            await self._servers.suspend(self._on_weight_update)
            if weights is not None and self._share is not None:
                weights = self._share(weights)
            num_bytes = await self._servers.receive(weights) if weights is not None else 0
            await self._servers.resume(version)
        elapsed = time.perf_counter() - started
        return [Metric("time/weight_update_s", elapsed, "sum"), Metric("weights/copied_bytes", num_bytes, "sum")]

    async def _fetch(self) -> NamedTensors:
        weights = self._weights()
        return await weights if isinstance(weights, Awaitable) else weights
