"""Weights travel between processes without a way over the host: over NCCL to another GPU, or as a copy on the
same one. On a CPU the same by gloo and shared memory."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import pytest
import torch

from turnwise.runtime.torch_group import Meeting
from turnwise.transfer.live import manifest_of
from turnwise.transfer.sender import WeightSender
from turnwise.transfer.staging import StagingMemory
from turnwise.transfer.weight_group import WeightGroup

TIMEOUT_S = 120.0
NAME = "weights"


def tensors_of(version: int, device: str) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    large = torch.rand(5_000_000, 2, generator=generator)  # more than a bucket, in bf16 too
    return [("large", large.to(device)), ("small", torch.rand(5, generator=generator).to(device))]


def sums(tensors: Any) -> dict[str, float]:
    return {name: tensor.double().sum().item() for name, tensor in tensors}


def expected(version: int) -> dict[str, float]:
    return sums((name, tensor.bfloat16()) for name, tensor in tensors_of(version, "cpu"))


def read_copy(pickled: bytes, answers: Any) -> None:
    answers.put(sums(pickle.loads(pickled)))


def receive_group(meeting: Meeting, manifest: Any, device: str, answers: Any) -> None:
    group = WeightGroup.find(meeting, TIMEOUT_S, device, NAME)
    group.join(1, 2)
    answers.put(sums(group.receive_tensors(manifest)))
    group.leave()


def test_a_copy_is_read_by_another_process_on_the_device(device: torch.device) -> None:
    version = 0
    sender = WeightSender(lambda: tensors_of(version, str(device)), is_shared=True, device=str(device))
    processes = multiprocessing.get_context("spawn")
    for version in (1, 2):
        sender.copy("bfloat16", ranks=(0,))
        _, weights = sender.copied()
        answers = processes.Queue()
        reader = processes.Process(target=read_copy, args=(pickle.dumps(weights), answers))
        reader.start()
        assert answers.get(timeout=TIMEOUT_S) == pytest.approx(expected(version))
        reader.join(TIMEOUT_S)


def test_a_group_brings_weights_to_another_gpu(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL connects different GPUs, and this machine has one")
    sending, receiving = ("cuda:0", "cuda:1") if device.type == "cuda" else ("cpu", "cpu")
    tensors = tensors_of(1, sending)
    memory = StagingMemory(manifest_of(tensors), "bfloat16", sending)
    memory.write(tensors)
    group = WeightGroup.open("127.0.0.1", TIMEOUT_S, device=sending, name=NAME)
    processes = multiprocessing.get_context("spawn")
    answers = processes.Queue()
    arguments = (group.meeting, memory.manifest, receiving, answers)
    receiver = processes.Process(target=receive_group, args=arguments)
    receiver.start()
    group.join(0, 2)
    group.send(memory.buckets)
    group.await_finished()
    group.leave()
    assert answers.get(timeout=TIMEOUT_S) == pytest.approx(expected(1))
    receiver.join(TIMEOUT_S)
