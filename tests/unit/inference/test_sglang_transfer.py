"""SGLang's own transfer of weights: the trainer's first rank sends into a server's processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import letter_model
from sglang_fake import SGLangFake
from transformers import PreTrainedModel
from weight_ranks import Ranks

from turnwise.cluster.engine_senders import SendingEngines
from turnwise.cluster.weight_senders import SendingRanks
from turnwise.errors import LostWeightsError, ModelError, ServerError
from turnwise.inference.http_json import HttpJson
from turnwise.inference.server_manager import LLMServerManager
from turnwise.inference.sglang_server import SGLangServer
from turnwise.inference.sglang_transfer import copy_requests
from turnwise.models.load import policy_info
from turnwise.runtime.rank import RankContext
from turnwise.transfer import buckets
from turnwise.transfer.group import GroupWeights
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.policy_transfer import PolicyTransfer
from turnwise.transfer.sender import WeightSender
from turnwise.transfer.staging import DeviceCopies, DeviceWeights
from turnwise.transfer.weight_group import WeightGroup
from turnwise.types import SamplingParams

TIMEOUT_S = 60.0


@pytest.fixture
def trained(tmp_path: Path) -> PreTrainedModel:
    return letter_model(tmp_path)


@pytest.fixture
def fake(trained: PreTrainedModel) -> Iterator[SGLangFake]:
    server = SGLangFake(deepcopy(trained)).start()
    yield server
    server.shutdown()
    server.server_close()


def transfer_to(
    fake: SGLangFake,
    trained: PreTrainedModel,
    folder: Path,
    num_processes: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> tuple[PolicyTransfer, SGLangServer]:
    client = SGLangServer(RankContext(), policy_info(str(folder), "fp32", 64), HttpJson(fake.url))
    manager = LLMServerManager([client])
    ranks: Any = Ranks(WeightSender(lambda: trained.named_parameters(), is_shared=True))
    sending = SendingEngines(
        SendingRanks(ranks, dtype="float32"), manager, "127.0.0.1", num_processes, timeout_s
    )
    return PolicyTransfer(manager, sending, suspends_first=True), client


def same(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


async def test_each_version_comes_whole_in_buckets(
    fake: SGLangFake, trained: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 2000)
    transfer, client = transfer_to(fake, trained, tmp_path)
    async with asyncio.timeout(TIMEOUT_S):
        for version in (1, 2):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(0.01 * version)
            assert not same(trained, fake.model)
            metrics = {metric.name: metric.value for metric in await transfer.update(version)}
            assert same(trained, fake.model) and fake.version == str(version)
            assert metrics["weights/copied_bytes"] == sum(p.nbytes for p in trained.parameters())
        completion = await client.generate([1, 2], SamplingParams(2), "c")
    assert [run.version for run in completion.versions] == [2]


async def test_a_server_that_breaks_off_leaves(
    fake: SGLangFake, trained: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its weights are new then."""
    transfer, client = transfer_to(fake, trained, tmp_path, timeout_s=2.0)

    def refuse(**_: Any) -> None:
        raise ValueError("out of memory")

    monkeypatch.setattr(fake.weights, "receive", refuse)
    weights = await transfer.sender.publish()
    with pytest.raises(ConnectionError, match="out of memory"):
        await client.receive(weights)


async def test_a_server_that_does_not_join_has_loaded_nothing(
    fake: SGLangFake, trained: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = transfer_to(fake, trained, tmp_path)
    # A sender that doesn't join: it would wait long for the one that lacks.
    group = WeightGroup.open("127.0.0.1", TIMEOUT_S)
    weights = GroupWeights(WeightManifest({}), group.meeting, {0: 1}, 1, 2, TIMEOUT_S, name="weights")
    coming = asyncio.create_task(asyncio.to_thread(group.gather, [0], 2))

    def refuse(**_: Any) -> None:
        raise ValueError("no such interface")

    monkeypatch.setattr(fake.weights, "join", refuse)
    with pytest.raises(LostWeightsError, match="no such interface"):
        await client.receive(weights)
    await coming


async def test_a_server_of_other_processes_is_told(
    fake: SGLangFake, trained: PreTrainedModel, tmp_path: Path
) -> None:
    transfer, client = transfer_to(fake, trained, tmp_path, num_processes=2)
    weights = await transfer.sender.publish()
    with pytest.raises(ModelError, match="has 1 processes, and weights are sent to 2"):
        await client.receive(weights)
    await weights.give_up("the test has ended")


async def test_a_session_that_a_run_has_left_open_is_closed(
    fake: SGLangFake, trained: PreTrainedModel, tmp_path: Path
) -> None:
    fake.weights.begin()
    transfer, _ = transfer_to(fake, trained, tmp_path)
    with torch.no_grad():
        next(trained.parameters()).add_(1.0)
    async with asyncio.timeout(TIMEOUT_S):
        await transfer.update(1)
    assert same(trained, fake.model)


async def test_a_group_that_stays_does_not_end_a_run(
    fake: SGLangFake, trained: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise ValueError("Failed to destroy custom process group")

    monkeypatch.setattr(fake.weights, "leave", refuse)
    transfer, client = transfer_to(fake, trained, tmp_path)
    async with asyncio.timeout(TIMEOUT_S):
        await transfer.update(1)
    assert same(trained, fake.model) and transfer.servers.servers == (client,)


def test_a_device_without_a_copy_is_named() -> None:
    copies = DeviceCopies(WeightManifest({}), {"here": {"another": DeviceWeights(WeightManifest({}), ())}})
    with pytest.raises(ServerError, match="no rank of the trainer has a copy of the weights on cpu"):
        copy_requests(copies, ["cpu"])
