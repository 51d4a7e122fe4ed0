"""More devices than all nodes have: refused at once, or awaited if an autoscaler adds nodes."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from small_configs import config_of

from turnwise.assemble.ray import placed_on_nodes
from turnwise.cluster import growing
from turnwise.cluster.growing import has_autoscaler, wait_for_nodes
from turnwise.config.place import place
from turnwise.errors import ConfigError, DeadlineError, MissingDeviceError
from turnwise.runtime.machine import Machine, Node

HEAD = {"NodeID": "0a", "Labels": {"ray.io/node-id": "0a"}}
WORKER = {"NodeID": "0b", "Labels": {}}


def status(**kinds: int) -> bytes:
    return json.dumps({"autoscaler_report": {"active_nodes": kinds, "pending_launches": {}}}).encode()


def mapped(**kinds: str) -> bytes:
    """The status of a provider that tells nodes by ids of its own."""
    return json.dumps({"autoscaler_report": {"active_nodes": {}, "node_type_mapping": kinds}}).encode()


@pytest.mark.parametrize(
    ("nodes", "said", "has"),
    [
        ([HEAD, WORKER], None, False),
        ([HEAD, WORKER], b"{}", False),
        ([HEAD, WORKER], b'{"autoscaler_report": null}', False),
        ([HEAD, WORKER], status(node_0a=1, node_0b=1), False),
        ([HEAD, WORKER], status(headgroup=1, node_0b=1), True),
        ([HEAD], mapped(id_of_head="node_0a"), False),
        ([HEAD], mapped(id_of_head="headgroup"), True),
        ([HEAD, {"NodeID": "0b", "Labels": {"ray.io/node-group": "gpus"}}], None, True),
    ],
)
def test_an_autoscaler_is_known_by_its_kinds_of_nodes(nodes, said, has):
    assert has_autoscaler(nodes, said) is has


class Time:
    """Passes as a wait pauses."""

    def __init__(self) -> None:
        self.seconds = 50.0

    def now(self) -> float:
        return self.seconds

    def pause(self, seconds: float) -> None:
        self.seconds += seconds


def test_nodes_are_awaited_until_they_are_there_with_reports(caplog):
    time = Time()

    def attempt() -> str:
        if time.now() < 50.0 + 35.0:
            raise MissingDeviceError("device 8")
        return "placed"

    with caplog.at_level(logging.INFO):
        assert wait_for_nodes(attempt, "2 × 8 GPU", lambda: "3 GPU", None, time.now, time.pause) == "placed"
    assert time.now() == pytest.approx(85.0)
    assert len(caplog.records) == 3
    assert "2 × 8 GPU" in caplog.text and "3 GPU" in caplog.text


def test_nodes_that_do_not_come_are_told_with_what_lacks():
    def attempt() -> str:
        raise MissingDeviceError("device 8 isn't there")

    time = Time()
    with pytest.raises(DeadlineError, match=r"60 s .*2 × 8 GPU.*device 8 isn't there.*deadlines\.start_s"):
        wait_for_nodes(attempt, "2 × 8 GPU", str, 60.0, time.now, time.pause)
    assert time.now() == pytest.approx(110.0)


class Ray:
    """Stands for the modules that import ray: its nodes grow when they are asked for."""

    def __init__(self, *nodes: Node, grows: bool) -> None:
        self.nodes = nodes
        self.grows = grows
        self.asked: list[list[dict[str, float]]] = []
        self.is_asking = False

    def join_ray(self, settings: object, num_slots: int = 1) -> Machine:
        return Machine(self.nodes)

    def may_grow(self) -> bool:
        return self.grows

    @contextmanager
    def asking_for(self, bundles: list[dict[str, float]]) -> Iterator[None]:
        self.asked.append(bundles)
        self.is_asking = True
        self.nodes = (*self.nodes, Node(2, "cuda", "b", key="b"))
        yield
        self.is_asking = False

    def free_amounts(self) -> str:
        return "nothing"


@pytest.fixture
def join(monkeypatch):
    def join(ray: Ray) -> Ray:
        for name, exported in {
            "ray_session": ("join_ray",),
            "ray_growth": ("may_grow", "asking_for", "free_amounts"),
        }.items():
            module = ModuleType(name)
            for function in exported:
                setattr(module, function, getattr(ray, function))
            monkeypatch.setitem(sys.modules, f"turnwise.cluster.{name}", module)
        monkeypatch.setattr(growing, "LOOK_S", 0.001)
        return ray

    return join


def config(last: int, **keys):
    devices = {"actor_train.device_mapping": [0, last]}
    return config_of(**{"cluster.address": "head:6379", **devices, **keys})


def placed(settings):
    return placed_on_nodes(settings, lambda nodes: place(settings, Machine(nodes)))


def test_devices_that_no_node_has_are_refused_at_once_without_an_autoscaler(join):
    ray = join(Ray(Node(2, "cuda", "a", key="a"), grows=False))
    with pytest.raises(ConfigError, match="device 3"):
        placed(config(3))
    assert ray.asked == []


@pytest.mark.parametrize(
    ("nodes", "keys", "bundles"),
    [
        ((Node(2, "cuda", "a", key="a"),), {}, [{"GPU": 1.0}] * 4),
        ((Node(2, "cuda", "a", key="a"),), {"num_gpus_per_node": 2}, [{"GPU": 2.0}] * 2),
        ((Node(2, name="a", key="a"),), {}, [{"CPU": 1.0}] * 4),
        ((Node(0, name="head", key="h"), Node(2, "cuda", "a", key="a")), {}, [{"GPU": 1.0}] * 4),
    ],
)
def test_an_autoscaler_is_asked_for_all_devices_of_the_run(join, nodes, keys, bundles):
    ray = join(Ray(*nodes, grows=True))
    placement = placed(config(3, **keys))
    assert placement.machine.node_of(3).name == "b"
    assert ray.asked == [bundles] and not ray.is_asking


def test_what_an_autoscaler_can_not_change_is_refused_at_once(join):
    ray = join(Ray(Node(4, "cuda", "a", key="a"), grows=True))
    strategy = {"strategy_name": "vllm", "strategy_config": {"tp_size": 3}}
    with pytest.raises(ConfigError):
        placed(config(3, **{"actor_infer.strategy_args": strategy, "actor_infer.device_mapping": [0, 1]}))
    assert ray.asked == []
