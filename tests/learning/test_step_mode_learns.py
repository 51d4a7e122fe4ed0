"""The whole library learns where each turn is a context of its own."""

from __future__ import annotations

from small_runs import LETTERS, folder_of_run, small_config, training

from turnwise.tracking.jsonl import read_metrics


def test_a_policy_learns_from_one_sample_a_turn(tiny_model, tmp_path):
    letters = LETTERS | {"mode": "step", "max_tokens_per_step": 1, "agent_system_template": ""}
    config = small_config(
        tiny_model,
        tmp_path,
        max_steps=10,
        save_steps=0,
        adv_estimator="gigpo",
        rollout_batch_size=48,
        sequence_length=48,
        actor_train=training(1e-2, 32),
        train_env_manager={"num_env_groups": 6, "group_size": 8},
        custom_envs={"Letters": letters | {"agent_template": "{current_observation}"}},
    )
    scores = [row["rollout/score/mean"] for row in read_metrics(folder_of_run(config).metrics)]
    assert scores[0] < 0.4 and scores[-1] > 1.2
