"""The whole library learns where each turn is a context of its own."""

from __future__ import annotations

import pytest

from turnwise.build.agentic import build_agentic
from turnwise.build.run import start_run
from turnwise.config import AgenticConfig, parse_config
from turnwise.tracking.jsonl import read_metrics


@pytest.mark.parametrize("estimator", ["grpo", "gigpo"])
def test_a_policy_learns_from_one_sample_a_turn(tiny_model, tmp_path, estimator):
    values = {
        "pretrain": str(tiny_model),
        "output_dir": str(tmp_path),
        "max_steps": 10,
        "save_steps": 0,
        "adv_estimator": estimator,
        "rollout_batch_size": 48,
        "sequence_length": 48,
        "track_with": [],
        "actor_train": {"training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 32}},
        "train_env_manager": {"num_env_groups": 6, "group_size": 8},
        "custom_envs": {
            "Letters": {
                "env_type": "turnwise.testing.toy_envs:LettersEnv",
                "mode": "step",
                "max_tokens_per_step": 1,
                "agent_system_template": "",
                "agent_template": "{current_observation}",
                "action_pattern": None,
            }
        },
    }
    config, _ = parse_config(values, AgenticConfig)
    folder = start_run(config)
    pipeline = build_agentic(config, folder)
    try:
        pipeline.run()
    finally:
        pipeline.close()
    scores = [row["rollout/score/mean"] for row in read_metrics(folder.metrics)]
    assert scores[0] < 0.4 and scores[-1] > 1.2
