"""Placements are computed from a config alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from small_configs import config_of

from turnwise.cli.config_command import placement_table
from turnwise.cli.main import main
from turnwise.cluster.placement import place
from turnwise.config import describe
from turnwise.errors import ConfigError
from turnwise.inference.visible_devices import only_visible
from turnwise.runtime.rank import launched

ROOT = Path(__file__).resolve().parents[3]

ONE = {"num_devices": 2, "accelerator": "", "is_apart": False}


@pytest.mark.parametrize(
    ("mappings", "options", "cluster", "processes"),
    [
        ({"actor_train": None}, {}, "local", {"actor_train": (0,)}),
        ({"actor_train": [1]}, {"accelerator": "cuda"}, "local", {"actor_train": (0,)}),
        ({"actor_train": None}, {"is_apart": True}, "process", {"actor_train": (0,)}),
        ({"actor_train": None}, {"cluster": "process"}, "process", {"actor_train": (0,)}),
        ({"actor_train": [0, 1], "critic": None}, {}, "process", {"actor_train": (0, 1), "critic": (0, 1)}),
        ({"actor_train": [0], "critic": [1], "reference": None}, {}, "process", {"critic": (1,), "reference": (0,)}),
        ({"sft": None}, {"num_launched": 2}, "launched", {"sft": (0, 1)}),
    ],
)
def test_one_process_for_each_device_holds_all_roles_on_it(mappings, options, cluster, processes):
    placement = place(mappings, **(ONE | options))
    assert placement.cluster == cluster
    assert {role: placement.roles[role].processes for role in processes} == processes
    assert placement.num_processes == len({process for role in placement.roles.values() for process in role.processes})


def test_a_rank_is_told_its_device_and_its_peers():
    placement = place({"actor_train": [1, 3], "critic": [3]}, num_devices=4, accelerator="cuda", is_apart=False)
    second, critic = placement.context("actor_train", 1), placement.context("critic", 0)
    assert placement.devices == (1, 3), "the processes are on the devices that are named, whatever their numbers"
    assert (second.rank, second.world_size, second.device, second.peers) == (1, 2, "cuda:3", (0, 1))
    assert (critic.rank, critic.world_size, critic.device, critic.peers) == (0, 1, "cuda:3", (1,))
    assert not second.answers and critic.answers
    assert placement.context("reward", 0).device == "cuda:1", "a role without a place is on the first device"


@pytest.mark.parametrize(
    ("mappings", "options", "message"),
    [
        (
            {"actor_train": [0, 2]},
            {},
            r"^actor_train\.device_mapping names device 2, and this machine has 2 slots.*num_gpus_per_node: 3",
        ),
        ({"actor_train": [4]}, {"accelerator": "cuda"}, r"names device 4, and this machine has 2 CUDA devices \(0 to 1\)"),
        ({"actor_train": [0, 1]}, {"cluster": "local"}, "cluster.name: local can't hold this run: the roles have 2 devices"),
        ({"actor_train": None}, {"cluster": "launched"}, "no launcher started this process"),
        ({"actor_train": None}, {"is_apart": True, "cluster": "local"}, "async_generation_ratio above 0 trains beside"),
        ({"sft": [0, 2]}, {}, "^device_mapping names device 2, and this machine"),
        (
            {"actor_train": [0]},
            {"num_launched": 2},
            r"1 device with actor_train\.device_mapping, and the launcher started 2 processes",
        ),
        ({"sft": [1]}, {"num_launched": 2}, "the roles have 1 device with device_mapping, and the launcher started 2"),
        (
            {"actor_train": [0, 1], "critic": [2]},
            {"num_launched": 2, "num_devices": 3},
            r"3 devices with critic\.device_mapping, and the launcher started 2 processes",
        ),
        (
            {"sft": [0, 1, 2]},
            {"num_launched": 3},
            "^the launcher started 3 processes.* 2 slots .*start 2 .*, or set num_gpus",
        ),
        (
            {"sft": None},
            {"num_launched": 3, "accelerator": "cuda"},
            "^the launcher started 3 processes.* 2 CUDA .*start 2",
        ),
        ({"actor_train": None}, {"num_launched": 2, "cluster": "process"}, "a launcher started this process"),
        ({"actor_train": None}, {"num_launched": 2, "is_apart": True}, "async_generation_ratio must be 0"),
    ],
)
def test_what_cannot_be_placed_says_what_to_change(mappings, options, message):
    with pytest.raises(ConfigError, match=message):
        place(mappings, **(ONE | options))


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
            ["actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[2,3]", "async_generation_ratio=1"],
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
            ["adv_estimator=gae", "critic.device_mapping=[1]", "data.reward=[reward_model]", "reward_pretrain=no/folder"],
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


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_launcher_of_one_machine_is_followed(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert launched() == (1, 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert launched() == (1, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, "8 processes, 4 of them on this machine"),
        ({"LOCAL_WORLD_SIZE": "x"}, "RANK=1 and WORLD_SIZE=8 and LOCAL_WORLD_SIZE=x, which no launcher sets"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE=, which no launcher sets.*unset RANK, WORLD_SIZE, LOCAL_WORLD_SIZE to"),
        ({"RANK": "8"}, "RANK=8 and WORLD_SIZE=8 .*which no launcher sets"),
        ({"RANK": "x", "LOCAL_WORLD_SIZE": None}, "RANK=x and WORLD_SIZE=8, which no launcher sets"),
        ({"RANK": "-1", "LOCAL_WORLD_SIZE": None}, "RANK=-1 and WORLD_SIZE=8, which no launcher sets"),
        ({"WORLD_SIZE": "", "LOCAL_WORLD_SIZE": None}, "RANK=1 and WORLD_SIZE=, which no launcher sets"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "but not MASTER_ADDR and MASTER_PORT.*torchrun or accelerate launch"),
        ({"MASTER_PORT": None}, "but not MASTER_PORT, where the processes meet"),
    ],
)
def test_an_environment_that_no_launcher_of_one_machine_sets_is_refused(changes, message, monkeypatch):
    for name, value in (LAUNCHED | changes).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        launched()


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
    assert config.replica_devices == expected
    lines = [line.split() for line in placement_table(config).splitlines()[1:-1]]
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
