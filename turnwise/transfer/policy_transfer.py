"""The orchestrator of weight updates. It holds no tensor and imports no torch."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field

from turnwise.errors import LostWeightsError
from turnwise.runtime.watchdog import Wait, Watchdog
from turnwise.transfer.contracts import JoiningServer, OnWeightUpdate, ReceivesWeights, SendsWeights
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.together import receive
from turnwise.types import Metric


@dataclass
class PolicyTransfer:
    """A `protocols.WeightTransfer` from the trainer to all servers of a run.

    Servers that read the trainer's own parameters are only suspended and resumed: they drop their caches and
    renew their reordered copies of the weights. Other servers receive the weights. `free_for_transfer` is
    awaited first, if roles share devices. With `suspends_first` the servers are suspended before the trainer
    gathers: both use one memory. An update may take `timeout_s` seconds, and so may a server that joins; one
    of the two runs at a time. `form` says how the weights travel, in `num_copies` copies."""

    servers: ReceivesWeights
    sender: SendsWeights
    _: KW_ONLY
    free_for_transfer: Callable[[], Awaitable[None]] | None = None
    on_weight_update: OnWeightUpdate = "finish"
    watchdog: Watchdog = field(default_factory=Watchdog)
    timeout_s: float | None = None
    suspends_first: bool = False
    form: str = ""
    num_copies: int = 0
    _manifest: WeightManifest | None = field(default=None, init=False)
    _version: int | None = field(default=None, init=False)
    _num_joined: int = field(default=0, init=False)
    _given_bytes: int = field(default=0, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def update(self, version: int) -> list[Metric]:
        """Suspends the servers, transfers the weights, and resumes the servers with `version`. Raises
        ModelError before anything is sent if the weights don't fit a server's model; DeadlineError past
        `timeout_s`."""
        started = time.perf_counter()
        awaited = f"the weights of version {version} to reach the inference servers"
        async with self._waiting(awaited), self._lock:
            if self.free_for_transfer is not None:
                await self.free_for_transfer()
            if self.servers.info().needs_weights:
                metrics = await self._send()
            else:
                await self.servers.suspend(self.on_weight_update)
                metrics = [Metric("weights/copied_bytes", 0, "sum")]
            await self.servers.resume(version)
            self._version = version
        elapsed = time.perf_counter() - started
        return [Metric("time/weight_update_s", elapsed, "sum"), *metrics, *self._joined()]

    async def join(self, server: JoiningServer) -> None:
        """Gives a new or restarted server the weights of the last update, and then admits it to the others.
        Until the first update it keeps those that it has loaded."""
        await self.bring_back(server)
        self._num_joined += 1

    async def bring_back(self, server: JoiningServer) -> None:
        """Does what `join` does with a server that was away, and doesn't count it as restarted."""
        async with self._waiting("the weights to reach an inference server that joins"), self._lock:
            if self._version is not None:
                await self._give(server, self._version)
            self.servers.join(server)

    def describe(self) -> str:
        """The form in which the weights travel, for the table of a run."""
        return self.form

    async def _send(self) -> list[Metric]:
        """Suspends the servers and brings them the weights."""
        started = time.perf_counter()
        await self.servers.begin_update(await self._known_manifest())
        if self.suspends_first:
            await self.servers.suspend(self.on_weight_update)
        weights = await self.sender.publish()
        if not self.suspends_first:
            await self.servers.suspend(self.on_weight_update)
        # What servers got that came in between is counted here.
        num_bytes = await self.servers.receive(weights, self.sender.publish_again) + self._given_bytes
        self._given_bytes = 0
        return [
            Metric("weights/copied_bytes", num_bytes, "sum"),
            Metric("weights/bytes", weights.manifest.num_bytes * self.num_copies, "sum"),
            Metric("weights/copies", self.num_copies, "max"),
            Metric("time/weight_transfer_s", time.perf_counter() - started, "sum"),
        ]

    async def _give(self, server: JoiningServer, version: int) -> None:
        """Brings the last update to one server."""
        await server.begin_update(await self._known_manifest())
        await server.suspend()
        if server.info().needs_weights:
            try:
                num_bytes = await receive(server, await self.sender.publish_again(server))
            except LostWeightsError:
                num_bytes = await receive(server, await self.sender.publish_again(server, is_lost=True))
            self._given_bytes += num_bytes
        await server.resume(version)

    async def _known_manifest(self) -> WeightManifest:
        if self._manifest is None:
            self._manifest = await self.sender.manifest()
        return self._manifest

    def _joined(self) -> list[Metric]:
        """How many servers have joined since the last update, if any."""
        num_joined = self._num_joined
        self._num_joined = 0
        return [Metric("system/replica_restarts", num_joined, "sum")] if num_joined else []

    def _waiting(self, awaited: str) -> Wait:
        return self.watchdog.waiting(
            "the pipeline",
            awaited,
            self.timeout_s,
            "deadlines.weights_s",
        )
