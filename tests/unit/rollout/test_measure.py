"""Metrics of rollouts against numbers counted by hand."""

from __future__ import annotations

import numpy as np

from turnwise.rollout.group_filter import non_zero_variance
from turnwise.rollout.measure import rollout_metrics, validation_metrics
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import Group, Task, Trajectory, Turn


def group(*episodes, tag="A"):
    task = Task(id="t", tag=tag, split="train", seed=0)
    trajectories = []
    for sibling, (rewards, metrics) in enumerate(episodes):
        turns = [
            Turn(
                prompt_ids=np.arange(4), response_ids=np.arange(2), logprobs=np.zeros(2, np.float32), reward=r
            )
            for r in rewards
        ]
        trajectories.append(Trajectory(task=task, sibling=sibling, turns=turns, metrics=metrics))
    return Group(task=task, trajectories=trajectories)


def test_rollout_metrics():
    groups = [
        group(([0, 1], {"success": 1.0}), ([0], {"success": 0.0})),
        group(([0], {"success": 0.0}), ([0], {"success": 0.0})),
    ]
    reduced = reduce_metrics(rollout_metrics(groups))
    assert reduced["rollout/score/mean"] == 0.25 and reduced["rollout/score/max"] == 1.0
    assert reduced["env/A/success"] == 0.25
    assert reduced["rollout/zero_variance_groups"] == 0.5
    assert reduced["rollout/sampled_tokens"] == 10 and reduced["rollout/total_tokens"] == 30
    assert reduced["rollout/non_prompt_length/max"] == 8 and reduced["rollout/prompt_length/mean"] == 4


def test_scores_that_differ_by_rounding_are_a_group_without_variance():
    groups = [group(([0.6], {}), ([0.1 + 0.2 + 0.3], {})), group(([0.6], {}), ([0.60001], {}))]
    assert reduce_metrics(rollout_metrics(groups))["rollout/zero_variance_groups"] == 0.5
    assert [non_zero_variance(one) for one in groups] == [False, True]


def test_what_was_lost_to_failures_is_counted():
    lost = group(([1], {}), ([0], {}))
    lost.trajectories[1].status = "failed"
    reduced = reduce_metrics(rollout_metrics([group(([1], {}))], rejected=[lost]))
    assert (reduced["rollout/failed"], reduced["rollout/rejected"], reduced["rollout/score/mean"]) == (
        1,
        2,
        1.0,
    )


def test_failed_episodes_are_counted_but_not_scored():
    groups = [group(([1], {"success": 1.0}), tag="B")]
    groups[0].trajectories.append(Trajectory(task=groups[0].task, sibling=1, status="failed", error="boom"))
    reduced = reduce_metrics(validation_metrics(groups))
    assert reduced["val/score/mean"] == reduced["val/B/score/mean"] == reduced["val/env/B/success"] == 1.0
    assert reduced["val/failed"] == 0.5
