"""Every estimator runs from a config, and `rollouts.jsonl` holds what its advantages follow from."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from small_runs import LETTERS, run_small, small_config

from turnwise.algorithms.kl import KLController
from turnwise.batching.samples import build_samples
from turnwise.examine.algorithm import make_algorithm
from turnwise.rollout.record import read_record
from turnwise.spec import ESTIMATORS
from turnwise.tracking.jsonl import read_metrics
from turnwise.types import Group


def run(model, tmp_path, **changes):
    toy = {**LETTERS, "max_steps": 3, "agent_system_template": "", "mode": changes.pop("mode", "trajectory")}
    own = {"max_steps": 1, "save_steps": 0, "sequence_length": 128, "custom_envs": {"Letters": toy}}
    config = small_config(model, tmp_path, **own | changes)
    return config, run_small(config).folder


def read_groups(path):
    """The groups of a file of rollouts with their samples, and the advantage that the file has of each
    turn."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    groups, advantages = [], []
    for _, of_group in itertools.groupby(rows, key=lambda row: row["group"]):
        group = Group(task=None, trajectories=[], index=len(groups))
        for row in of_group:
            _, trajectory = read_record(json.dumps(row))
            trajectory.samples = build_samples(trajectory)
            group.task = trajectory.task
            if row["is_baseline"]:
                group.greedy = trajectory
            else:
                group.trajectories.append(trajectory)
                advantages += [turn["advantage"] for turn in row["turns"]]
        groups.append(group)
    return groups, advantages


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "trajectory") for name in ESTIMATORS), ("step_reinforce", "step"), ("gigpo", "step")],
)
def test_a_run_credits_as_its_rollouts_say(name, mode, tiny_model, tmp_path):
    config, folder = run(
        tiny_model, tmp_path, adv_estimator=name, mode=mode, gamma=0.9 if ESTIMATORS[name].discounts else 1.0
    )
    [row] = read_metrics(folder.metrics)
    assert (
        row["actor/backward_steps"] > 0
        and np.isfinite(row["actor/pg_loss"])
        and row["critic/advantages/max"] > 0
    )
    groups, saved = read_groups(folder.rollouts)
    assert [len(group.trajectories) for group in groups] == [4, 4]
    if "values" in ESTIMATORS[name].needs:
        return
    make_algorithm(config, KLController(0.0)).credit(groups)
    again = [
        sample.advantages[span.start : span.stop]
        for group in groups
        for trajectory in group.trajectories
        for sample in trajectory.samples
        for span in sample.turn_spans
    ]
    for computed, written in zip(again, saved, strict=True):
        np.testing.assert_allclose(computed, written, atol=1e-6)
