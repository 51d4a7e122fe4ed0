"""DeepSpeed's world where a role has some of the run's processes, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from turnwise.runtime.rank import RankContext
from turnwise.training.deepspeed_group import RoleBackend, join_role

NUMBER = 1
"""The number of this process among three."""


class TorchBackend:
    """DeepSpeed's backend, which notes who sends."""

    def __init__(self) -> None:
        self.sources: list[int] = []

    def broadcast(self, tensor: Any, source: int, group: Any, is_async: bool) -> None:
        self.sources.append(source)


@pytest.fixture(autouse=True)
def three_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")  # else it would be set for the tests that follow
    dist.init_process_group("fake", store=FakeStore(), rank=NUMBER, world_size=3)
    yield
    dist.destroy_process_group()


def joined(deepspeed: Any, *peers: int) -> RoleBackend:
    context = RankContext("critic", peers.index(NUMBER), len(peers), peers=peers)
    join_role(deepspeed, torch.device("cpu"), context)
    backend: RoleBackend = deepspeed.comm.comm.cdb
    return backend


@pytest.fixture
def deepspeed() -> Any:
    comm = SimpleNamespace(cdb=None)

    def init_distributed(*_: object, **__: object) -> None:
        comm.cdb = TorchBackend()

    comm.init_distributed = init_distributed
    return SimpleNamespace(comm=SimpleNamespace(comm=comm, torch=SimpleNamespace()))


@pytest.mark.parametrize("peers", [(1, 2), (2, 1)])
def test_the_first_process_of_the_group_is_rank_0(deepspeed: Any, peers: tuple[int, ...]) -> None:
    """torch sorts the processes of a group, whatever the order of `device_mapping`."""
    backend = joined(deepspeed, *peers)
    assert backend.get_rank() == 0 and backend.get_world_size() == 2
    backend.broadcast(torch.zeros(1), backend.get_rank())
    assert backend.sources == [NUMBER]


def test_two_roles_on_the_same_devices_in_any_order_share_a_world(deepspeed: Any) -> None:
    first = joined(deepspeed, 1, 2)
    assert joined(deepspeed, 2, 1) is first


def test_two_roles_on_all_devices_in_another_order_share_a_world(deepspeed: Any) -> None:
    deepspeed.comm.comm.cdb = all_processes = TorchBackend()
    assert joined(deepspeed, 2, 1, 0) is all_processes
