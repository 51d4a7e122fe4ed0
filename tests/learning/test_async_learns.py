"""A policy learns to give back the kind that is shown while rollouts go on, from samples that are a step
old."""

from __future__ import annotations

import pytest
from small_runs import LETTERS, folder_of_run, small_config, training

from turnwise.tracking.jsonl import read_metrics


@pytest.mark.extra
def test_a_policy_learns_from_stale_samples(tiny_model, tmp_path):
    kinds = {"env_type": "toy_envs:KindsEnv", "env_config": {"num_turns": 2}}
    config = small_config(
        tiny_model,
        tmp_path,
        max_steps=80,
        save_steps=0,
        rollout_batch_size=64,
        sequence_length=96,
        async_generation_ratio=1,
        on_weight_update="abort_continue",
        train_infer_correction={"is_weight": {"weight_type": "token", "upper_bound": 2.0}},
        actor_train=training(5e-3, 64),  # at 1e-2 the order of requests decides whether 40 steps are enough
        train_env_manager={"num_env_groups": 16, "group_size": 8},
        custom_envs={"Kinds": LETTERS | kinds | {"max_tokens_per_step": 1, "agent_system_template": ""}},
    )
    rows = read_metrics(folder_of_run(config).metrics)
    scores = [row["rollout/score/mean"] for row in rows]
    assert scores[0] < 0.2 and sum(scores[-5:]) / 5 > 0.6
    assert max(row["actor/staleness_max"] for row in rows) == 1
