"""Two runs of one config and seed are the same to the last bit, in processes of their own, but for how long
things took."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch

from turnwise.config import AgenticConfig, dump_yaml


@pytest.fixture
def profile():
    """Resets the deterministic profile, which is a state of torch, for the tests that follow."""
    yield "deterministic=true"
    torch.use_deterministic_algorithms(False)


def train_elsewhere(config: AgenticConfig, folder: Path) -> Path:
    """`turnwise train` in a process of its own; returns the folder of the run."""
    file = folder / "config.yaml"
    file.write_text(dump_yaml(config), encoding="utf-8")
    done = forked.run(["train", file])
    assert done.returncode == 0, done.stderr
    [run] = (Path(config.output_dir) / config.exp_name).iterdir()
    return run


def assert_same(one, other):
    assert one.folder != other.folder and len(one.metrics) == 3
    assert one.metrics == other.metrics
    assert one.rollouts == other.rollouts
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())


@pytest.mark.extra
def test_two_processes_give_the_same_run(profile, lake_config, train, read_run, tmp_path):
    assert_same(train(lake_config(profile)), read_run(train_elsewhere(lake_config(profile), tmp_path)))


def test_on_a_cpu_runs_repeat_themselves_outside_of_the_profile_too(lake_config, train):
    assert_same(*(train(lake_config("adv_estimator=gae")) for _ in range(2)))


def test_another_seed_gives_another_run(plain, lake_config, train):
    one, other = plain, train(lake_config("seed=4"))
    assert one.metrics != other.metrics
    assert [row["task"]["seed"] for row in one.rollouts] != [row["task"]["seed"] for row in other.rollouts]
    assert one.rollouts[0]["turns"][0]["observation"] != other.rollouts[0]["turns"][0]["observation"]
    assert any(not torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())
