"""Roles whose ranks are processes of a cluster, and their optimiser steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from rank_workers import Kind
from small_configs import config_of
from toy_model import toy_samples

from turnwise.assemble.cluster import set_torch_threads
from turnwise.batching.plan import denominators
from turnwise.cluster.fork_server import prepare_processes
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.cluster.weight_senders import spawn_senders
from turnwise.config.place import place
from turnwise.pipelines.model_role import BatchPlan, ModelRole
from turnwise.protocols import Loss, StepPart, WeightSource
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.machine import Machine, Node
from turnwise.runtime.placement import CpuThreads
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog

STEPS = 3


@dataclass(eq=False)
class SendingRole(ModelRole):
    cluster: ProcessCluster | None = None

    def sent_weights(self) -> WeightSource:
        """The weights as the inference servers get them, gathered by all ranks."""
        senders = spawn_senders(self.cluster, self.name, is_shared=True, is_sharded=True)
        return senders.publish().result()


def cluster_of(
    runner: WatchedRunner,
    mappings: dict[str, list[int]],
    stopwatch: Stopwatch,
    sizes: Mapping[str, Any] | None = None,
) -> ProcessCluster:
    """A cluster of processes for roles on these devices, which are divided by these parallel sizes."""
    prepare_processes(["turnwise.assemble.strategies"])
    num_devices = max(map(max, mappings.values())) + 1
    mapped: dict[str, Any] = {f"{role}.device_mapping": devices for role, devices in mappings.items()}
    if sizes:
        for role in mappings:
            mapped[f"{role}.strategy_args"] = {"strategy_name": "megatron_train", "strategy_config": sizes}
    estimator = "gae" if "critic" in mappings else "grpo"
    config = config_of(adv_estimator=estimator, **{"cluster.name": "process"}, **mapped)
    return ProcessCluster(
        runner.run,
        runner.watchdog,
        stopwatch,
        CpuThreads(num_devices, 1, torch.get_num_threads()),
        set_torch_threads,
        deadline_s=60.0,
        placement=place(config, Machine((Node(num_devices),))),
    )


@pytest.fixture
def runner() -> Iterator[WatchedRunner]:
    with WatchedRunner(Watchdog()) as runner:
        yield runner


@pytest.fixture
def make_roles(runner):
    """Roles of a kind, by their names, on these devices of one cluster, with micro-batches of three
    samples."""
    clusters = []

    def make(kind: Kind, mappings: dict[str, list[int]]) -> list[ModelRole]:
        stopwatch = Stopwatch()
        cluster = cluster_of(runner, mappings, stopwatch, kind.megatron)
        clusters.append(cluster)
        plan = BatchPlan(samples_per_step=16, max_length=64, seed=0, max_sequences=3)
        return [
            SendingRole(name, cluster.spawn(name, kind.make), plan, stopwatch, cluster=cluster)
            for name in mappings
        ]

    yield make
    for cluster in clusters:
        cluster.shutdown()


@pytest.fixture
def make_role(make_roles):
    """A role of a kind on so many ranks."""
    return lambda kind, num_ranks: make_roles(kind, {"actor_train": list(range(num_ranks))})[0]


def steps(role: ModelRole, loss: Loss, num_steps: int = STEPS) -> list[dict[str, float]]:
    """The summed metrics of each optimiser step."""
    measured = []
    for step in range(num_steps):
        sums: dict[str, float] = {}
        for metric in role.optimizer_step(toy_samples(11, seed=step), loss, position=step):
            sums[metric.name] = sums.get(metric.name, 0.0) + float(metric.value)
        measured.append(sums)
    return measured


def in_two_parts(role: ModelRole, loss: Loss) -> None:
    """One more step, whose samples come in two parts."""
    samples = toy_samples(11, seed=STEPS)
    divisors = denominators(samples, 64)
    role.backward(samples[:5], divisors, loss, STEPS, StepPart(0, None))
    role.backward(samples[5:], divisors, loss, STEPS, StepPart(1, 2.0))


def ask(role: ModelRole, method: str) -> Any:
    return role.workers.call(method, route="rank0").result()


def moved(role: ModelRole, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value - start[name] for name, value in ask(role, "parameters").items()}
