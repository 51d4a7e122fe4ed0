"""Servers in processes of their own, made in a module that those processes can import."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from turnwise.assemble.placement import set_torch_threads
from turnwise.cluster.messages import SetUp
from turnwise.cluster.process import WorkerProcess
from turnwise.cluster.server_process import SERVERS, ServerProcess
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.protocols import WeightSource
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.transfer.shared_memory import SharedMemory

STEP_S = 0.02
"""Seconds of a step of the other process's engine, so that a request of forty tokens can be met in the
middle."""


class SharingProcess(ServerProcess):
    """Brings weights to shared memory itself, as the transfer of a run does."""

    def __init__(self, *talk: Any) -> None:
        super().__init__(*talk)
        self._memory: SharedMemory | None = None

    async def receive(self, weights: WeightSource) -> int:
        self._memory = self._memory or SharedMemory(weights.manifest)
        self._memory.write(weights)
        return await super().receive(self._memory.weights)

    async def let_it_sample(self) -> None:
        await asyncio.sleep(8 * STEP_S)


def server_in_a_process(model: PreTrainedModel, **options: Any) -> SharingProcess:
    """An embedded server with a copy of the model."""
    forked = WorkerProcess.fork("the replica", SERVERS, Stopwatch())
    process = SharingProcess(forked, _run_elsewhere, Watchdog())
    set_up = SetUp(dict(os.environ), list(sys.path), os.getcwd(), {}, partial(set_torch_threads, 1))
    process.begin(set_up, partial(_make, model, options), RankContext("actor_infer"))
    process.wait_until_ready()
    return process


def _make(model: PreTrainedModel, options: dict[str, Any], rank: RankContext) -> EmbeddedServer:
    server = EmbeddedServer(model, stopwatch=rank.stopwatch, **options)
    step: Callable[[], Any] = server._engine.step

    def slow() -> Any:
        time.sleep(STEP_S)
        return step()

    server._engine.step = slow  # type: ignore[method-assign]
    return server


def _run_elsewhere(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine where the calling thread has a running event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, main).result()
