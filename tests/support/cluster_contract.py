"""What every cluster must do, as checks over a started cluster whose role `actor_train` may have several
ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise.cluster.weight_senders import spawn_senders
from turnwise.errors import DataError, WorkerError
from turnwise.protocols import Cluster
from turnwise.runtime.machine import Machine, Node
from turnwise.runtime.placement import ClusterName, CpuThreads, Placement, RolePlacement
from turnwise.runtime.rank import Layout, RankContext

LARGE = 2**17  # elements: more than a socket takes at once
THREADS = CpuThreads(train=1, rollout=1, total=1)


def placement_of(cluster: ClusterName, size: int, machine: Machine | None = None) -> Placement:
    """`actor_train` on the slots 0 to `size` − 1, a replica on each, and `sharded` beside it, whose replicas
    are of two ranks."""
    numbers = tuple(range(size))
    devices = tuple((number,) for number in numbers)
    sharded = Layout(dp=max(size // 2, 1), tp=min(size, 2))
    roles = {
        "actor_train": RolePlacement(devices, numbers, Layout(dp=size)),
        "sharded": RolePlacement(devices, numbers, sharded),
    }
    return Placement(cluster, machine or Machine((Node(size),)), numbers, roles)


class Worker:
    """Lives where the rank lives."""

    def __init__(self, rank: RankContext) -> None:
        self.context = rank
        self.notes: list[int] = []

    def place(self) -> tuple[str, int, int]:
        return self.context.role, self.context.rank, self.context.world_size

    def process(self) -> int:
        return os.getpid()

    def add(self, numbers: list[Any], offset: int = 0) -> list[Any]:
        return [number + offset for number in numbers]

    def note(self, number: int) -> list[int]:
        self.notes.append(number)
        return self.notes

    def compute(self, numbers: list[int]) -> list[int]:
        """As a rank of a sharded model: only the rank that answers for its replica has results."""
        self.notes += numbers
        is_answer = self.context.layout.answers(self.context.rank)
        return [10 * number for number in numbers] if is_answer else [-1]

    def noted(self) -> list[int]:
        return self.notes

    def coordinates(self) -> tuple[int, ...]:
        return self.context.position

    def fail(self) -> None:
        raise DataError(f"no rows for rank {self.context.rank}")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.full((2, 3), float(len(self.notes)))


class Neighbour(Worker):
    def neighbour_notes(self) -> list[int]:
        worker: Worker = self.context.neighbours["actor_train"]
        return worker.notes


def calls_reach_the_ranks_that_their_route_names(cluster: Cluster) -> None:
    workers = cluster.spawn("actor_train", Worker)
    numbers = list(range(2 * workers.size))
    assert workers.call("add", numbers, route="split", offset=3).result() == [
        number + 3 for number in numbers
    ]
    assert workers.call("add", numbers, route="broadcast").result() == numbers
    assert workers.call("add", numbers, route="rank0").result() == numbers
    assert workers.call("place").result() == ("actor_train", 0, workers.size)


def ranks_of_a_replica_share_what_is_dealt(cluster: Cluster) -> None:
    workers = cluster.spawn("sharded", Worker)
    layout = Layout(workers.dp_size, workers.size // workers.dp_size)
    numbers = list(range(2 * workers.dp_size))
    answers = workers.call("compute", numbers, route="split").result()
    assert answers == [10 * number for number in numbers]
    for rank in range(workers.size):
        replica = layout.position(rank).dp
        assert workers.at(rank).call("noted").result() == numbers[2 * replica : 2 * replica + 2]
        assert workers.at(rank).call("coordinates").result() == layout.position(rank)


def one_rank_is_called_alone(cluster: Cluster) -> None:
    workers = cluster.spawn("actor_train", Worker)
    for rank in range(workers.size):
        assert workers.at(rank).call("place").result() == ("actor_train", rank, workers.size)
    last = workers.size - 1
    assert workers.at(last).call("add", [1], offset=2).result() == [3]
    assert workers.at(last).call("note", 5).result() == [5]
    assert workers.at(0).call("note", 6).result() == ([5, 6] if last == 0 else [6])


def ranks_that_are_not_there_are_named(cluster: Cluster) -> None:
    workers = cluster.spawn("actor_train", Worker)
    for rank in (-1, workers.size):
        with pytest.raises(WorkerError, match=rf"actor_train has no rank {rank}"):
            workers.at(rank)


def large_arrays_arrive_in_both_directions(cluster: Cluster) -> None:
    workers = cluster.spawn("actor_train", Worker)
    arrays = [np.full(LARGE, number, np.float32) for number in range(workers.size)]
    results = workers.call("add", arrays, route="split", offset=1).result()
    assert [result.shape for result in results] == [(LARGE,)] * workers.size
    assert [np.unique(result).tolist() for result in results] == [
        [number + 1.0] for number in range(workers.size)
    ]


def calls_of_a_rank_run_in_their_order(cluster: Cluster) -> None:
    workers = cluster.spawn("actor_train", Worker)
    calls = [workers.at(0).call("note", 1), workers.call("note", 2), workers.call("note", 3, route="rank0")]
    assert calls[-1].result() == [1, 2, 3]


def an_error_of_a_worker_is_raised_by_its_call(cluster: Cluster) -> None:
    workers = cluster.spawn("actor_train", Worker)
    last = workers.size - 1
    with pytest.raises(DataError, match=f"no rows for rank {last}"):
        workers.at(last).call("fail").result()
    assert workers.at(last).call("add", [1]).result() == [1], "a rank that has failed goes on"


def a_role_beside_another_has_its_ranks_and_sees_its_workers(cluster: Cluster) -> None:
    workers = cluster.spawn("actor_train", Worker)
    beside = cluster.spawn("beside", Neighbour, beside="actor_train")
    assert beside.size == workers.size
    for rank in range(workers.size):
        workers.at(rank).call("note", rank).result()
        assert beside.at(rank).call("place").result() == ("beside", rank, workers.size)
        assert beside.at(rank).call("neighbour_notes").result() == [rank]
        assert beside.at(rank).call("process").result() == workers.at(rank).call("process").result()


def weights_are_published_by_the_rank_that_answers(cluster: Cluster) -> None:
    workers = cluster.spawn("actor_train", Worker)
    for is_sharded in (False, True):
        senders = spawn_senders(cluster, "actor_train", is_shared=True, is_sharded=is_sharded)
        manifest = senders.manifest().result()
        assert manifest.tensors["a"].shape == (2, 3)
        workers.call("note", 1).result()
        weights = senders.publish().result()
        assert weights.manifest == manifest
        assert {name: tensor.unique().tolist() for name, tensor in weights} == {
            "a": [2.0 if is_sharded else 1.0]
        }


CHECKS: tuple[Callable[[Cluster], None], ...] = (
    calls_reach_the_ranks_that_their_route_names,
    ranks_of_a_replica_share_what_is_dealt,
    one_rank_is_called_alone,
    ranks_that_are_not_there_are_named,
    large_arrays_arrive_in_both_directions,
    calls_of_a_rank_run_in_their_order,
    an_error_of_a_worker_is_raised_by_its_call,
    a_role_beside_another_has_its_ranks_and_sees_its_workers,
    weights_are_published_by_the_rank_that_answers,
)
