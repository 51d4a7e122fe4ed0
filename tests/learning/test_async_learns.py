"""The kind that is shown is given back: learned while rollouts go on, from samples that are a step old."""

from __future__ import annotations

from turnwise.build.agentic import build_agentic
from turnwise.build.run import start_run
from turnwise.config import AgenticConfig, parse_config
from turnwise.tracking.jsonl import read_metrics


def test_a_policy_learns_from_stale_samples(tiny_model, tmp_path):
    values = {
        "pretrain": str(tiny_model),
        "output_dir": str(tmp_path),
        "max_steps": 40,
        "save_steps": 0,
        "rollout_batch_size": 64,
        "sequence_length": 96,
        "track_with": [],
        "async_generation_ratio": 1,
        "on_weight_update": "abort_continue",
        "train_infer_correction": {"is_weight": {"weight_type": "token", "upper_bound": 2.0}},
        "actor_train": {"training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 64}},
        "train_env_manager": {"num_env_groups": 16, "group_size": 8},
        "custom_envs": {
            "Kinds": {
                "env_type": "turnwise.testing.toy_envs:KindsEnv",
                "env_config": {"num_turns": 2},
                "max_steps": 2,
                "max_tokens_per_step": 1,
                "agent_system_template": "",
                "agent_template": "{observation}",
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
    rows = read_metrics(folder.metrics)
    scores = [row["rollout/score/mean"] for row in rows]
    assert scores[0] < 0.2 and sum(scores[-5:]) / 5 > 0.6
    assert max(row["actor/staleness_max"] for row in rows) == 1
