"""Weight updates of servers that live in this process."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.errors import ModelError
from turnwise.protocols import InferenceServer, OnWeightUpdate
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Metric

Weights = Iterable[tuple[str, Tensor]]


class InProcessTransfer:
    """Makes servers sample from the trainer's current weights: `protocols.WeightTransfer` for servers of this process.

    Servers that read the trainer's own parameters only need to be suspended and resumed: they drop their caches and their
    reordered copies of the weights. `copies` are the servers' models that are not the trainer's (another dtype, device or
    process): they are written in place from `weights`, which gives the trainer's `(Hugging Face name, tensor)` pairs, or
    something to await that does, as another process needs. An update may take `timeout_s` seconds.

    Raises:
        ModelError: there are `copies` and no `weights` to fill them from.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        weights: Callable[[], Weights | Awaitable[Weights]] | None = None,
        copies: Sequence[PreTrainedModel] = (),
        on_weight_update: OnWeightUpdate = "finish",
        watchdog: Watchdog | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if copies and weights is None:
            raise ModelError("an InProcessTransfer with copies of the model needs `weights`, the trainer's named tensors")
        self._servers = tuple(servers)
        self._weights = weights
        self._copies = tuple(copies)
        self._on_weight_update = on_weight_update
        self._watchdog = watchdog or Watchdog()
        self._timeout_s = timeout_s

    async def update(self, version: int) -> list[Metric]:
        """Suspends the servers, transfers, bumps their version to `version` and resumes them.

        Raises:
            ModelError: a name or shape of `weights` doesn't fit a copy, or a copy's tensor got none.
            DeadlineError: past `timeout_s`.
        """
        started = time.perf_counter()
        waiter, awaited = "the pipeline", f"the weights of version {version} to reach the inference servers"
        async with self._watchdog.waiting(waiter, awaited, self._timeout_s, "deadlines.weights_s"):
            weights = await self._fetch() if self._weights is not None and self._copies else None
            for server in self._servers:
                await server.suspend(self._on_weight_update)
            num_bytes = self._copy(weights) if weights is not None else 0
            for server in self._servers:
                await server.resume(version)
        elapsed = time.perf_counter() - started
        return [Metric("time/weight_update_s", elapsed, "sum"), Metric("weights/copied_bytes", num_bytes, "sum")]

    async def _fetch(self) -> Weights:
        assert self._weights is not None
        weights = self._weights()
        return await weights if isinstance(weights, Awaitable) else weights

    def _copy(self, weights: Weights) -> int:
        targets = [model.state_dict() for model in self._copies]
        written: set[int] = set()
        num_bytes = 0
        with torch.no_grad():
            for name, tensor in weights:
                for target in targets:
                    if name not in target or target[name].shape != tensor.shape:
                        raise ModelError(f"the trainer's tensor {name} {tuple(tensor.shape)} doesn't fit the server's model")
                    target[name].copy_(tensor)
                    written.add(target[name].data_ptr())
                    num_bytes += target[name].nbytes
        missed = [name for target in targets for name, tensor in target.items() if tensor.data_ptr() not in written]
        if missed:
            raise ModelError(f"the trainer gave no values for {len(missed)} tensors of the server's model, such as {missed[0]}")
        return num_bytes
