"""The orchestrator of weight updates. It holds no tensor and imports no torch."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field

from turnwise.runtime.watchdog import Watchdog
from turnwise.transfer.contracts import OnWeightUpdate, ReceivesWeights, SendsWeights
from turnwise.transfer.manifest import WeightManifest
from turnwise.types import Metric


@dataclass
class PolicyTransfer:
    """A `protocols.WeightTransfer` from the trainer to all servers of a run.

    Servers that read the trainer's own parameters are only suspended and resumed: they drop their caches and
    renew their reordered copies of the weights. Other servers receive the weights. `free_for_transfer` is
    awaited first, if roles share devices. An update may take `timeout_s` seconds."""

    servers: ReceivesWeights
    sender: SendsWeights
    _: KW_ONLY
    free_for_transfer: Callable[[], Awaitable[None]] | None = None
    on_weight_update: OnWeightUpdate = "finish"
    watchdog: Watchdog = field(default_factory=Watchdog)
    timeout_s: float | None = None
    _manifest: WeightManifest | None = field(default=None, init=False)

    async def update(self, version: int) -> list[Metric]:
        """Suspends the servers, transfers the weights, and resumes the servers with `version`. Raises
        ModelError before anything is sent if the weights don't fit a server's model; DeadlineError past
        `timeout_s`."""
        started = time.perf_counter()
        awaited = f"the weights of version {version} to reach the inference servers"
        async with self.watchdog.waiting("the pipeline", awaited, self.timeout_s, "deadlines.weights_s"):
            if self.free_for_transfer is not None:
                await self.free_for_transfer()
            num_bytes = 0
            if self.servers.info().needs_weights:
                num_bytes = await self._send()
            else:
                await self.servers.suspend(self.on_weight_update)
            await self.servers.resume(version)
        elapsed = time.perf_counter() - started
        return [
            Metric("time/weight_update_s", elapsed, "sum"),
            Metric("weights/copied_bytes", num_bytes, "sum"),
        ]

    async def _send(self) -> int:
        """Suspends the servers and brings them the weights. Returns the number of bytes that they have
        written."""
        if self._manifest is None:
            self._manifest = await self.sender.manifest()
        await self.servers.begin_update(self._manifest)
        weights = await self.sender.publish()
        await self.servers.suspend(self.on_weight_update)
        return await self.servers.receive(weights)
