"""Copies of the weights on the devices of the trainer's ranks, for engines on the same devices."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turnwise.cluster.engine_senders import CopyingRanks
from turnwise.cluster.weight_senders import SendingRanks
from turnwise.errors import WorkerError
from turnwise.transfer import buckets
from turnwise.transfer.buckets import buckets_of
from turnwise.transfer.live import manifest_of
from turnwise.transfer.sender import WeightSender
from turnwise.transfer.staging import DeviceCopies, StagingMemory

TENSORS = [
    ("a", torch.rand(30, 7)),
    ("odd", torch.arange(3, dtype=torch.int8)),
    ("b", torch.rand(5).double()),
    ("none", torch.empty(0)),
    ("large", torch.rand(2000)),
]


@pytest.mark.parametrize("size", [1, 64, 10**6])
def test_a_bucket_is_read_as_it_was_written(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", size)
    memory = StagingMemory(manifest_of(TENSORS), "", "cpu")
    memory.write(TENSORS)
    received: dict[str, torch.Tensor] = {}
    for bucket, data in zip(buckets_of(memory.manifest), memory.buckets, strict=True):
        assert data.numel() <= size or len(bucket.tensors) == 1
        received.update(bucket.views(data.clone()))
    assert list(received) == [name for name, _ in TENSORS]
    assert all(torch.equal(received[name], tensor) for name, tensor in TENSORS)


def test_what_is_written_is_narrowed_and_checked() -> None:
    memory = StagingMemory(manifest_of(TENSORS), "bfloat16", "cpu")
    memory.write(TENSORS)
    narrow = memory.manifest.tensors
    assert narrow["large"].dtype == "bfloat16" and narrow["odd"].dtype == "int8"
    with pytest.raises(WorkerError, match=r"odd is .* now"):
        memory.write([("a", torch.rand(30, 7)), ("odd", torch.rand(3))])


class Ranks:
    """Ranks that read their weights together, in threads, as those of a sharded model."""

    def __init__(self, size: int) -> None:
        self.value = 0.0
        self._barrier = Barrier(size)
        self._pool = ThreadPoolExecutor(size)
        self._senders = [WeightSender(self._read, is_shared=True, rank=rank) for rank in range(size)]

    def _read(self) -> list[tuple[str, torch.Tensor]]:
        self._barrier.wait(60)
        return [("a", torch.full((3,), self.value))]

    async def call(self, method: str, *arguments: Any) -> None:
        await asyncio.gather(*(self.at(rank).call(method, *arguments) for rank in range(len(self._senders))))

    def at(self, rank: int) -> Any:
        def call(method: str, *arguments: Any) -> Any:
            return asyncio.wrap_future(self._pool.submit(getattr(self._senders[rank], method), *arguments))

        return SimpleNamespace(call=call)


def values(weights: Any) -> dict[str, list[float]]:
    copies = pickle.loads(pickle.dumps(weights)).by_device()
    return {device: dict(copy)["a"].tolist() for device, copy in copies.items()}


async def test_each_node_of_servers_has_a_copy_version_after_version() -> None:
    ranks: Any = Ranks(3)
    sending = CopyingRanks(SendingRanks(ranks, dtype="bfloat16"), {0: "home", 2: "away"})
    for version in (1.0, 2.0):
        ranks.value = version
        weights = await sending.publish()
        assert isinstance(weights, DeviceCopies) and weights.manifest.num_bytes == 6
        for node in ("home", "away"):
            assert values(weights.on(node)) == {"cpu": [version] * 3}
    ranks.value = 3.0  # the trainer has moved on since
    assert values((await sending.publish_again()).on("away")) == {"cpu": [2.0] * 3}
    with pytest.raises(WorkerError, match="none on 'elsewhere'"):
        weights.on("elsewhere")
    with pytest.raises(WorkerError, match="one by one"):
        iter(weights)
