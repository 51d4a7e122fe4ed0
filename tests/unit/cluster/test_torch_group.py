"""What keeps processes from joining is said in a sentence."""

from __future__ import annotations

import logging
import os
import socket

import pytest
import torch
import torch.distributed as dist

from turnwise.cluster.child import Child
from turnwise.cluster.messages import Network
from turnwise.errors import ConfigError, WorkerError
from turnwise.runtime import torch_group
from turnwise.runtime.torch_group import join_processes


def test_a_rank_that_nobody_joins_names_those_that_did_not_come(tmp_path, monkeypatch):
    """torch itself would wait for a day."""
    monkeypatch.setattr(torch_group, "_JOIN_S", 0.2)
    with pytest.raises(
        WorkerError, match=r"rank 1 of 3 waited 0.2 s for rank 0, rank 2; .* the first process must train"
    ):
        join_processes(str(tmp_path / "rendezvous"), 1, 3, "cpu")
    assert not dist.is_initialized()


def test_a_port_in_use_says_how_to_take_another(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": "0",
            "WORLD_SIZE": "2",
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            WorkerError, match=rf"rank 0 of 2 could not join .*port {port} is taken; .*--master_port"
        ):
            join_processes(None, 0, 2, "cpu")
    assert not dist.is_initialized()


@pytest.mark.parametrize(("has_gpu", "has_nccl"), [(False, True), (True, False)])
def test_nccl_without_gpus_names_the_rank(tmp_path, monkeypatch, has_gpu, has_nccl):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    with pytest.raises(
        WorkerError, match=r"rank 1 of 2 is to train on cuda:1 over NCCL, but its torch .* same CUDA_VISIBLE"
    ):
        join_processes(str(tmp_path / "rendezvous"), 1, 2, "cuda:1")


class NoWire:
    """Takes what is sent."""

    def send(self, message: object) -> None: ...


def test_an_address_that_no_interface_has_is_named(tmp_path, monkeypatch):
    """Over the loopback interface gloo would wait for other machines, which can't come."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(torch_group, "_JOIN_S", 0.2)
    handlers = logging.getLogger().handlers[:]
    child = Child(NoWire())
    logging.getLogger().handlers[:] = handlers
    logging.captureWarnings(False)
    network = Network("cpu", [], address="203.0.113.7")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7; .*cluster\.interface"):
        child.join(str(tmp_path / "rendezvous"), 0, 2, network)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(WorkerError, match="waited"):
        child.join(str(tmp_path / "rendezvous"), 0, 2, network)
