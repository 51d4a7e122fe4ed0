"""Manifests, the forms in which weights travel, and the order of an update."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from toy_model import toy_model
from toy_transfer import transfer_of

from turnwise.errors import LostWeightsError, ModelError, WorkerError
from turnwise.protocols import WeightSource
from turnwise.runtime.rank import RankContext
from turnwise.testing.fakes import ScriptedServer
from turnwise.transfer.files import folder_of, read_folder
from turnwise.transfer.live import LiveWeights, manifest_of
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.receiver import copy_into, manifest_of_model
from turnwise.transfer.sender import WeightSender, make_sender
from turnwise.transfer.shared_memory import SharedMemory

A = ("a", torch.ones(2, 3))
B = ("b", torch.zeros(1, dtype=torch.bfloat16))


class NotingServer(ScriptedServer):
    """Notes the steps of an update, and has a copy of the weights that arrive."""

    def __init__(self, model: WeightManifest) -> None:
        super().__init__([])
        self.steps: list[str] = []
        self.model = model
        self.weights: dict[str, Tensor] = {}

    async def begin_update(self, manifest: WeightManifest) -> None:
        self.steps.append("begin_update")
        manifest.check_fits(self.model, "the server")

    async def suspend(self, suspension: str = "finish") -> None:
        self.steps.append("suspend")

    async def receive(self, weights: WeightSource) -> int:
        self.steps.append("receive")
        self.weights = {name: tensor.clone() for name, tensor in weights}
        return weights.manifest.num_bytes

    async def resume(self, version: int) -> None:
        self.steps.append(f"resume {version}")

    def info(self):
        info = super().info()
        return type(info)(info.model, info.engine, 0, 0, needs_weights=True)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_version_reaches_every_server_step_by_step(is_shared: bool) -> None:
    trained = [torch.zeros(2, 3)]
    servers = [NotingServer(manifest_of([A])) for _ in range(2)]
    transfer = transfer_of(servers, lambda: [("a", trained[0])], is_shared=is_shared)
    for version in (1, 2):
        trained[0] += 1
        metrics = {metric.name: metric.value for metric in asyncio.run(transfer.update(version))}
        assert metrics["weights/copied_bytes"] == 2 * 24
        for server in servers:
            assert server.steps == ["begin_update", "suspend", "receive", f"resume {version}"]
            assert server.weights["a"].unique().tolist() == [float(version)]
            server.steps.clear()


def test_weights_that_one_server_has_no_place_for_are_sent_to_none() -> None:
    num_iterations = 0

    def read() -> Iterator[tuple[str, Tensor]]:
        nonlocal num_iterations
        num_iterations += 1
        yield A

    servers = [NotingServer(manifest_of([A])), NotingServer(manifest_of([A, B]))]
    with pytest.raises(ModelError, match=r"no values for 1 tensor .* such as b; .*model_name_or_path"):
        asyncio.run(transfer_of(servers, read).update(1))
    assert num_iterations == 1, "for the manifest"
    assert [server.steps for server in servers] == [["begin_update"]] * 2


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([A, B], ""),
        ([A, ("b", torch.zeros(1))], ""),
        ([A, B, ("c", torch.ones(2))], r"c \(2,\) doesn't fit .* no tensor of that name"),
        ([("a", torch.ones(3, 2)), B], r"a \(3, 2\) doesn't fit .* shape \(2, 3\) there"),
        ([B], "no values for 1 tensor .* such as a"),
    ],
)
def test_names_and_shapes_must_be_the_model_s_and_dtypes_may_differ(
    sent: list[tuple[str, Tensor]], message: str
) -> None:
    model = manifest_of([A, B])
    if not message:
        manifest_of(sent).check_fits(model, "the server")
        return
    with pytest.raises(ModelError, match=message):
        manifest_of(sent).check_fits(model, "the server")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_name_of_tied_tensors_is_enough(device: str) -> None:
    model = toy_model(tie_word_embeddings=True)
    model.to(device)
    model.tie_weights()
    tensors = dict(model.named_parameters())
    expected = manifest_of_model(model)
    manifest_of(tensors.items()).check_fits(expected, "the server")
    manifest_of(model.state_dict().items()).check_fits(expected, "the server")
    embeddings = tensors.pop("model.embed_tokens.weight")
    manifest_of([*tensors.items(), ("lm_head.weight", embeddings)]).check_fits(expected, "the server")
    with pytest.raises(ModelError, match=r"no values for 2 tensors"):
        manifest_of(tensors.items()).check_fits(expected, "the server")


def test_a_model_receives_in_place() -> None:
    model, trained = (
        toy_model(tie_word_embeddings=True),
        toy_model(seed=1, tie_word_embeddings=True).to(torch.bfloat16),
    )
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert copy_into(model, LiveWeights.of(trained.named_parameters)) == sum(
        p.nbytes for p in model.parameters()
    )
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    for mine, theirs in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, theirs.float())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", torch.zeros(2))], r"a is float32 \[2\] now, but it was float32 \[2, 3\]"),
        ([("a", torch.zeros(2, 3, dtype=torch.float64))], r"a is float64 \[2, 3\] now"),
        ([("c", torch.zeros(2))], "c is .* now, but it was unknown"),
        ([], "a is missing, but it was among the tensors"),
    ],
)
def test_other_tensors_than_the_manifest_says_are_refused_in_every_form(
    tensors: Sequence, message: str
) -> None:
    manifest = manifest_of([A])
    with pytest.raises(WorkerError, match=message):
        SharedMemory(manifest).write(tensors)
    with pytest.raises(WorkerError, match=message):
        list(LiveWeights(manifest, lambda: tensors))


def test_shared_weights_are_mapped_by_whoever_gets_them() -> None:
    memory = SharedMemory(manifest_of([A, B]))
    memory.write([A, B])
    copy = pickle.loads(pickle.dumps(memory.weights))
    assert {name: (tensor.dtype, tensor.shape, tensor.sum().item()) for name, tensor in copy} == {
        "a": (torch.float32, torch.Size([2, 3]), 6.0),
        "b": (torch.bfloat16, torch.Size([1]), 0.0),
    }
    kept = dict(copy)
    memory.write([("a", 2 * A[1]), B])
    assert kept["a"].sum().item() == 12.0, "the same memory"
    assert len(pickle.dumps(memory.weights)) < 1000


def test_memory_that_can_not_be_had_is_told_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_small(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", too_small)
    with pytest.raises(
        WorkerError, match=r"the 4 MB that bring the weights to other processes can't be had: No space left"
    ):
        SharedMemory(manifest_of([("a", torch.zeros(2**20))]))


def test_only_the_rank_that_answers_keeps_a_sharded_model() -> None:
    gathered = []

    class Strategy:
        def weights(self) -> Iterator[tuple[str, Tensor]]:
            gathered.append("a")
            yield A

    first, second = (
        make_sender("actor_train", True, RankContext(rank=rank, neighbours={"actor_train": Strategy()}))
        for rank in range(2)
    )
    assert first.manifest() == second.manifest() == manifest_of([A])
    assert [name for name, _ in first.publish()] == ["a"]
    assert second.publish() is None
    assert len(gathered) == 4, "both took part in each gather"


def test_a_published_source_in_process_holds_no_copy() -> None:
    trained = torch.zeros(2)
    weights = WeightSender(lambda: [("a", trained)], is_shared=False).publish()
    trained += 1
    assert weights is not None and [tensor for _, tensor in weights] == [trained]


def test_an_engine_reads_shared_weights_where_they_are() -> None:
    tensors = [A, B, ("ids", torch.arange(3)), ("view", torch.arange(8.0)[::2])]
    memory = SharedMemory(manifest_of(tensors))
    memory.write(tensors)
    folder = folder_of(memory.weights, "float32")
    try:
        [file] = folder.path.iterdir()
        assert file.is_symlink() and os.path.samefile(file, memory.weights.path), "there is no copy"
        assert folder.num_bytes == 24 + 2 + 24 + 16
        arrived = dict(read_folder(folder.path))
        assert {name: tensor.tolist() for name, tensor in arrived.items()} == {
            name: tensor.tolist() for name, tensor in tensors
        }
    finally:
        folder.remove()
    assert not folder.path.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the memory is a file with a name")
def test_weights_whose_owner_has_ended_are_lost_unless_they_are_held() -> None:
    memory = SharedMemory(manifest_of([A]))
    memory.write([A])
    weights = memory.weights
    folder = folder_of(weights, "float32")
    memory._file.close()  # as the end of a process does
    for read in (lambda: list(weights), lambda: folder_of(weights, "float32")):
        with pytest.raises(LostWeightsError, match="has ended"):
            read()
    assert dict(read_folder(folder.path))["a"].tolist() == A[1].tolist()
    folder.remove()


def test_weights_of_this_process_reach_an_engine_in_its_dtype_each_tensor_once() -> None:
    tied = ("tied", A[1])
    folder = folder_of(LiveWeights.of(lambda: [A, B, tied]), "bfloat16")
    try:
        arrived = dict(read_folder(folder.path))
        assert {name: tensor.dtype for name, tensor in arrived.items()} == dict.fromkeys("ab", torch.bfloat16)
        assert torch.equal(arrived["a"], A[1].bfloat16())
    finally:
        folder.remove()


def test_servers_of_a_narrower_dtype_get_half_the_bytes() -> None:
    trained = torch.linspace(-1, 1, 6).view(2, 3)
    sender = WeightSender(lambda: [("a", trained), B], is_shared=True)
    weights = sender.publish("bfloat16")
    assert weights is not None and weights.manifest.num_bytes == 12 + 2
    assert torch.equal(dict(weights)["a"], trained.bfloat16())
    assert sender.manifest().num_bytes == 24 + 2, "what the trainer has"
    wide = sender.publish()
    assert wide is not None and torch.equal(dict(wide)["a"], trained)
