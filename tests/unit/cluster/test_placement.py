"""Placements are computed from a config and a described machine."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_configs import SFT, config_of

from turnwise.cli.main import main
from turnwise.config import SFTConfig, describe, parse_config
from turnwise.config.demand import ray_reason
from turnwise.config.place import follows, place, smallest_machine
from turnwise.errors import ConfigError
from turnwise.inference.visible_devices import only_visible
from turnwise.runtime.machine import Machine, Node, find_machine
from turnwise.runtime.placement import RolePlacement
from turnwise.runtime.rank import Layout, launched

ROOT = Path(__file__).resolve().parents[3]

TWO_SLOTS, TWO_GPUS = Machine((Node(2),)), Machine((Node(2, "cuda"),))
ACTOR, CRITIC, REFERENCE = "actor_train.device_mapping", "critic.device_mapping", "reference.device_mapping"
GAE, KL = {"adv_estimator": "gae"}, {"use_kl_loss": True}
AHEAD, PROCESS = {"async_generation_ratio": 1}, {"cluster.name": "process"}


def launched_on(machine: Machine, num_launched: int) -> Machine:
    return replace(machine, num_launched=num_launched)


@pytest.mark.parametrize(
    ("keys", "machine", "cluster", "processes"),
    [
        ({}, TWO_SLOTS, "local", {"actor_train": (0,), "actor_infer": (0,)}),
        ({ACTOR: [1]}, TWO_GPUS, "local", {"actor_train": (0,), "actor_infer": (0,)}),
        (AHEAD, TWO_SLOTS, "process", {"actor_train": (0,), "actor_infer": (-1,)}),
        (PROCESS, TWO_SLOTS, "process", {"actor_train": (0,)}),
        (GAE | {ACTOR: [0, 1]}, TWO_SLOTS, "process", {"actor_train": (0, 1), "critic": (0, 1)}),
        (GAE | KL | {ACTOR: [0], CRITIC: [1]}, TWO_SLOTS, "process", {"critic": (1,), "reference": (0,)}),
        (
            {"actor_infer.device_mapping": [0, 1]},
            TWO_SLOTS,
            "local",
            {"actor_train": (0,), "actor_infer": (1, 2)},
        ),
        (
            {ACTOR: [0, 1], "actor_infer.device_mapping": [0, 1]},
            TWO_SLOTS,
            "process",
            {"actor_infer": (2, 3)},
        ),
        ({}, launched_on(TWO_SLOTS, 2), "launched", {"actor_train": (0, 1), "actor_infer": (0,)}),
    ],
)
def test_one_process_for_each_device_holds_all_roles_on_it(keys, machine, cluster, processes):
    placement = place(config_of(**keys), machine)
    assert placement.cluster == cluster
    assert {role: placement.of(role).processes for role in processes} == processes
    assert placement.num_processes == len(
        {process for role in placement.roles.values() for process in role.processes}
    )


def test_fine_tuning_has_one_role():
    config, _ = parse_config(SFT, SFTConfig)
    placement = place(config, launched_on(TWO_SLOTS, 2))
    assert (placement.cluster, placement.roles["sft"].processes, placement.num_servers) == (
        "launched",
        (0, 1),
        0,
    )
    config, _ = parse_config(SFT | {"device_mapping": [0, 2]}, SFTConfig)
    with pytest.raises(ConfigError, match=r"^device_mapping names device 2, and this machine"):
        place(config, TWO_SLOTS)


def test_a_rank_is_told_its_device_and_its_peers():
    config = config_of(
        **GAE,
        **{ACTOR: [1, 3], CRITIC: [3]},
        data={"reward": ["reward_model"]},
        reward_pretrain="models/none",
    )
    placement = place(config, Machine((Node(4, "cuda"),)))
    second, critic = placement.context("actor_train", 1), placement.context("critic", 0)
    assert placement.devices == (1, 3), (
        "the processes are on the devices that are named, whatever their numbers"
    )
    assert (second.rank, second.world_size, second.device, second.peers) == (1, 2, "cuda:3", (0, 1))
    assert (critic.rank, critic.world_size, critic.device, critic.peers) == (0, 1, "cuda:3", (1,))
    assert not second.answers and critic.answers
    assert placement.device_of("reward") == "cuda:1"
    assert placement.ranks_on(3) == {"actor_train": 1, "critic": 0}


def test_neighbours_are_in_one_process():
    config = config_of(**GAE, **KL)
    alone = place(config, TWO_SLOTS)
    assert alone.neighbours("actor_infer") == {"actor_train": 0, "reference": 0, "critic": 0}
    apart = place(config_of(**GAE, **AHEAD, **{ACTOR: [0, 1], CRITIC: [1]}), TWO_SLOTS)
    assert apart.neighbours("actor_infer") == {}, "it has a copy of the trainer's weights"
    assert apart.neighbours("actor_train", 1) == {"critic": 0} and apart.neighbours("actor_train") == {}
    launched = place(config, launched_on(TWO_SLOTS, 2))
    assert "actor_train" not in launched.neighbours("actor_infer"), "it trains in a thread of its own"


def test_devices_are_numbered_through_the_nodes():
    machine = Machine((Node(2, "cuda", "head"), Node(4, "cuda", "second")))
    strategy = {"strategy_name": "vllm", "strategy_config": {"tp_size": 2}}
    config = config_of(
        **{ACTOR: [0, 1, 2, 3]}, actor_infer={"strategy_args": strategy, "device_mapping": [2, 3, 4, 5]}
    )
    placement = place(config, machine)
    assert [placement.device_of("actor_train", rank) for rank in range(4)] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
        "cuda:1",
    ]
    server = placement.of("actor_infer")
    assert (server.ranks, server.layout, server.num_replicas) == (
        ((2, 3), (4, 5)),
        Layout(dp=2, tp=2),
        2,
    )
    assert placement.devices_of("actor_infer", 1) == ("cuda:2", "cuda:3")
    assert [machine.locate(device) for device in (1, 2, 5)] == [(0, 1), (1, 0), (1, 3)]
    with pytest.raises(IndexError):
        machine.locate(6)


def test_slots_are_as_many_as_the_config_says_and_accelerators_as_there_are():
    assert place(config_of(**{ACTOR: [0, 3], "num_gpus_per_node": 4}), TWO_SLOTS).devices == (0, 3)
    with pytest.raises(ConfigError, match="device 3, and this machine has 2 CUDA devices"):
        place(config_of(**{ACTOR: [0, 3], "num_gpus_per_node": 4}), TWO_GPUS)


@pytest.mark.parametrize(
    ("keys", "machine", "message"),
    [
        (
            {ACTOR: [0, 2]},
            TWO_SLOTS,
            r"^actor_train\.device_mapping names device 2, and this machine has 2 "
            r"slots.*num_gpus_per_node: 3",
        ),
        (GAE | {CRITIC: [2]}, TWO_SLOTS, r"^critic\.device_mapping names device 2"),
        ({ACTOR: [4]}, TWO_GPUS, r"names device 4, and this machine has 2 CUDA devices \(0 to 1\)"),
        ({"actor_infer.device_mapping": [0, 5]}, TWO_SLOTS, r"^actor_infer\.device_mapping names device 5"),
        ({"cluster.name": "launched"}, TWO_SLOTS, "no launcher started this process"),
        (
            {ACTOR: [0]},
            launched_on(TWO_SLOTS, 2),
            r"1 device with actor_train\.device_mapping, and the launcher started 2 processes",
        ),
        (
            GAE | {ACTOR: [0, 1], CRITIC: [2]},
            launched_on(Machine((Node(3),)), 2),
            r"3 devices with critic\.device_mapping, and the launcher started 2 processes",
        ),
        (
            {},
            launched_on(TWO_SLOTS, 3),
            "^the launcher started 3 processes.* 2 slots .*start 2 .*, or set num_gpus",
        ),
        ({}, launched_on(TWO_GPUS, 3), "^the launcher started 3 processes.* 2 CUDA .*start 2"),
        (PROCESS, launched_on(TWO_SLOTS, 2), "a launcher started this process"),
        (AHEAD, launched_on(TWO_SLOTS, 2), "async_generation_ratio must be 0"),
        (
            {"actor_infer.device_mapping": [0, 1]},
            launched_on(TWO_SLOTS, 2),
            "servers in their own processes need a run without",
        ),
    ],
)
def test_what_a_machine_lacks_says_what_to_change(keys, machine, message):
    config = config_of(**keys)
    assert place(config, smallest_machine(config)), "it isn't wrong"
    with pytest.raises(ConfigError, match=message):
        place(config, machine)


def test_training_on_given_episodes_needs_no_process_beside_them():
    config = config_of(**AHEAD)
    assert place(config, TWO_SLOTS, plays=False).cluster == "local"


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            [],
            [
                "device  actor_train  actor_infer",
                "0       rank 0       replica 0",
                "(training in this process; sampling in this process)",
            ],
        ),
        (
            [
                "actor_train.device_mapping=[0,1]",
                "actor_infer.device_mapping=[2,3]",
                "async_generation_ratio=1",
            ],
            [
                "device  actor_train  actor_infer",
                "0       rank 0       -",
                "1       rank 1       -",
                "2       -            replica 0",
                "3       -            replica 1",
                "(a process for each training device; 2 inference processes)",
            ],
        ),
        (
            [
                "adv_estimator=gae",
                "critic.device_mapping=[1]",
                "data.reward=[reward_model]",
                "reward_pretrain=no/folder",
            ],
            [
                "device  actor_train  critic  actor_infer  reward",
                "0       rank 0       -       replica 0    replica 0",
                "1       -            rank 0  -            -",
                "(a process for each training device; sampling in this process)",
            ],
        ),
    ],
)
def test_the_config_tells_roles_by_devices_without_having_them(overrides, lines, capsys):
    path = str(ROOT / "examples/frozen_lake/agentic.yaml")
    assert main(["config", path, *overrides]) == 0
    assert capsys.readouterr().out.splitlines()[-len(lines) - 1 :] == ["# where the roles run", *lines]
    assert main(["config", path, "--json", *overrides]) == 0
    assert json.loads(capsys.readouterr().out)["placement"] == lines


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_a_launcher_of_one_machine_is_followed(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert launched() == (1, 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert launched() == (1, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9, which no launcher sets"),
        ({"LOCAL_WORLD_SIZE": "x"}, "RANK=1 and WORLD_SIZE=8 and LOCAL_WORLD_SIZE=x, which no launcher sets"),
        (
            {"LOCAL_WORLD_SIZE": ""},
            "LOCAL_WORLD_SIZE=, which no launcher sets.*unset RANK, WORLD_SIZE, LOCAL_WORLD_SIZE to",
        ),
        ({"RANK": "8"}, "RANK=8 and WORLD_SIZE=8 .*which no launcher sets"),
        ({"RANK": "x", "LOCAL_WORLD_SIZE": None}, "RANK=x and WORLD_SIZE=8, which no launcher sets"),
        ({"RANK": "-1", "LOCAL_WORLD_SIZE": None}, "RANK=-1 and WORLD_SIZE=8, which no launcher sets"),
        ({"WORLD_SIZE": "", "LOCAL_WORLD_SIZE": None}, "RANK=1 and WORLD_SIZE=, which no launcher sets"),
        (
            {"MASTER_ADDR": None, "MASTER_PORT": None},
            "but not MASTER_ADDR and MASTER_PORT.*torchrun or accelerate launch",
        ),
        ({"MASTER_PORT": None}, "but not MASTER_PORT, where the processes meet"),
    ],
)
def test_an_environment_that_no_launcher_sets_is_refused(changes, message, monkeypatch):
    for name, value in (LAUNCHED | changes).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        launched()


def launched_here(monkeypatch, **changes):
    for name, value in (LAUNCHED | changes).items():
        monkeypatch.setenv(name, value)


def test_a_launcher_of_two_machines_has_a_node_for_each(monkeypatch):
    launched_here(monkeypatch, LOCAL_WORLD_SIZE="4", MASTER_ADDR="192.0.2.1")
    monkeypatch.setattr("turnwise.runtime.machine.own_address", lambda peer: "192.0.2.7")
    machine = find_machine()
    assert [node.num_devices for node in machine.nodes] == [4, 4] and machine.num_launched == 8
    placement = place(config_of(), machine)
    assert placement.cluster == "launched" and placement.of("actor_train").devices == tuple(range(8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "3"}, "8 processes, 3 of them on this machine"),
        ({"LOCAL_WORLD_SIZE": "4"}, "MASTER_ADDR=127.0.0.1 .*no other machine reaches"),
        ({"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "nowhere.invalid"}, "nowhere.invalid: .*no way"),
    ],
)
def test_machines_of_a_launcher_that_can_not_meet_are_refused(changes, message, monkeypatch):
    launched_here(monkeypatch, **changes)
    with pytest.raises(ConfigError, match=message):
        find_machine()


@pytest.mark.parametrize(
    ("named", "size", "expected"),
    [
        ([0, 2, 4, 6], 2, [[0, 2], [4, 6]]),
        ([6, 4, 2, 0], 2, [[6, 4], [2, 0]]),
        ([3, 1], 2, [[3, 1]]),
        ([5, 2], 1, [[5], [2]]),
        (None, 2, None),
    ],
)
def test_a_replica_is_on_its_part_of_the_device_mapping(
    named: list[int] | None, size: int, expected: list[list[int]] | None
) -> None:
    strategy = {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": size}}
    config = config_of(actor_infer={"strategy_args": strategy, "device_mapping": named})
    placement = place(config, smallest_machine(config))
    assert placement.of("actor_infer").ranks == tuple(map(tuple, expected or [[0]]))
    lines = [line.split() for line in placement.table().splitlines()[1:-1]]
    shown = {int(line[0]): " ".join(line[-2:]) for line in lines}
    for replica, devices in enumerate(expected or [[0]]):
        assert all(shown[device] == f"replica {replica}" for device in devices)
    if size > 1 and expected:
        rows = str(dict(describe(config).rows))
        assert all(", ".join(map(str, devices)) in rows for devices in expected)


def test_new_processes_see_a_replica_s_gpus_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, expected in ((None, "4,6"), ("7,6,5,4,3,2,1", "3,1")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if before is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
        with only_visible(("cuda:4", "cuda:6"), 2):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
    with only_visible(("cpu",), 2):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == "7,6,5,4,3,2,1"


def judged_on(device):
    """The keys of a run whose reward role has a model on this device."""
    return {
        "data": {"reward": "reward_model"},
        "reward_pretrain": "judge",
        "reward.device_mapping": [device],
    }


HEAD, LARGE, SMALL = Node(0, "", "head"), Node(4, "cuda", "large"), Node(2, "cuda", "small")


@pytest.mark.parametrize(
    ("keys", "machine", "reason"),
    [
        ({}, TWO_SLOTS, ""),
        ({"cluster.name": "ray"}, TWO_SLOTS, "cluster.name: ray"),
        ({"cluster.address": "head:6379"}, TWO_SLOTS, "cluster.address: head:6379"),
        ({}, replace(TWO_SLOTS, ray_sign="RAY_ADDRESS is set"), "RAY_ADDRESS is set"),
        (PROCESS, replace(TWO_SLOTS, ray_sign="RAY_ADDRESS is set"), ""),
        ({}, replace(TWO_SLOTS, num_launched=2, ray_sign="RAY_ADDRESS is set"), ""),
        ({ACTOR: [0, 1], "num_gpus_per_node": 2}, TWO_SLOTS, ""),
        ({ACTOR: [0, 2], "num_gpus_per_node": 2}, TWO_SLOTS, "device 2 is beyond the 2 devices of a node"),
        (judged_on(1) | {"num_gpus_per_node": 2}, TWO_SLOTS, ""),
        (judged_on(2) | {"num_gpus_per_node": 2}, TWO_SLOTS, "device 2 is beyond the 2 devices of a node"),
        ({"reward.device_mapping": [2], "num_gpus_per_node": 2}, TWO_SLOTS, ""),
    ],
)
def test_a_run_uses_ray_where_something_says_so(keys, machine, reason):
    found = ray_reason(config_of(**keys), machine)
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_devices_of_ray_are_numbered_through_or_by_node():
    keys = {"cluster.name": "ray", ACTOR: [0, 4]}
    machine = Machine((HEAD, LARGE, SMALL))
    through = place(config_of(**keys), machine)
    assert through.cluster == "ray" and "cluster.name: ray" in through.describe()
    nodes = [through.context("actor_train", rank).node for rank in range(2)]
    assert nodes == ["large", "small"], "a node without accelerators has no device"
    by_node = place(config_of(**keys, num_gpus_per_node=2), Machine((LARGE, HEAD, SMALL, LARGE)))
    assert [by_node.machine.locate(device) for device in (0, 3, 4)] == [(0, 0), (2, 1), (3, 0)]


def test_slots_of_ray_are_those_that_it_knows():
    """A head that gives Ray no core has no device, whatever num_gpus_per_node says."""
    keys = {"cluster.name": "ray", "num_gpus_per_node": 2}
    head, large, small = Node(0, name="head", key="h"), Node(8, name="large", key="l"), Node(1, key="s")
    placement = place(config_of(**keys, **{ACTOR: [0, 1, 2]}), Machine((head, large, small)))
    assert [placement.machine.locate(device) for device in (0, 1, 2)] == [(1, 0), (1, 1), (2, 0)]
    with pytest.raises(ConfigError, match="device 3, device 1 of node 1 "):
        place(config_of(**keys, **{ACTOR: [0, 3]}), Machine((head, large, small)))
    with pytest.raises(ConfigError, match="add nodes"):
        place(config_of(**{"cluster.name": "ray", ACTOR: [2]}), Machine((replace(small, num_devices=2),)))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({ACTOR: [0, 6]}, "device 6, and the nodes that Ray knows .*large 4, small 2"),
        ({ACTOR: [0, 7], "num_gpus_per_node": 4}, "device 7, device 3 of node 1 .*small 2"),
        ({ACTOR: [0, 8], "num_gpus_per_node": 4}, "device 8, device 0 of node 2 "),
        (
            {
                "actor_infer.strategy_args": {"strategy_name": "vllm", "strategy_config": {"tp_size": 2}},
                "actor_infer.device_mapping": [3, 4],
            },
            "replica 0 the devices 3, 4, which are on large and small",
        ),
    ],
)
def test_what_no_node_of_ray_has_is_refused_by_name(keys, words):
    with pytest.raises(ConfigError, match=words):
        place(config_of(**{"cluster.name": "ray"}, **keys), Machine((HEAD, LARGE, SMALL)))


def test_a_launcher_and_ray_exclude_each_other():
    with pytest.raises(ConfigError, match="a launcher started this process"):
        place(config_of(**{"cluster.name": "ray"}), launched_on(TWO_SLOTS, 2))


def test_the_number_of_devices_of_a_node_counts_for_the_reward_role_alone():
    keys = {**judged_on(2), "num_gpus_per_node": 2}
    assert follows(config_of(**keys), "num_gpus_per_node")
    assert not follows(config_of(**keys, **PROCESS), "num_gpus_per_node")


def test_the_reward_role_follows_its_devices_under_ray():
    keys = {ACTOR: [0], "actor_infer.device_mapping": [1], **judged_on(5)}
    machine = Machine((HEAD, LARGE, SMALL))
    placement = place(config_of(**{"cluster.name": "ray"}, **keys), machine)
    assert placement.of("reward") == RolePlacement(((5,),), (2,))
    with pytest.raises(ConfigError, match=r"reward\.device_mapping names device 6"):
        place(config_of(**{"cluster.name": "ray"}, **keys | {"reward.device_mapping": [6]}), machine)
    assert place(config_of(**keys), TWO_GPUS).of("reward").devices == (0,)


def test_replicas_of_ray_have_processes_of_their_own_and_the_table_names_nodes():
    keys = {"cluster.name": "ray", ACTOR: [0, 1], "actor_infer.device_mapping": [4]}
    placement = place(config_of(**keys), Machine((HEAD, LARGE, SMALL)))
    assert placement.serves_apart
    assert placement.of("actor_infer").processes == (2,)
    assert placement.all_devices == (0, 1, 4)
    lines = [line.split() for line in placement.table().splitlines()]
    assert lines[1] == ["0", "large:0", "rank", "0", "-"]
    assert lines[3] == ["4", "small:0", "-", "replica", "0"]
