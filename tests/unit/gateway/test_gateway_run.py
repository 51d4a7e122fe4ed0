"""A run that trains functions of users through the gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import folder_of_run, measured, played, training

from turnwise.config import AgenticConfig, parse_config


def gateway_config(model: Path, folder: Path, agent: dict[str, Any], **changes: Any) -> AgenticConfig:
    rows = [{"prompt": text, "answer": "a"} for text in ("P _ G", "G _ P", "_ P G", "P G _")]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values: dict[str, Any] = {
        "pretrain": str(model),
        "output_dir": str(folder / "runs"),
        "max_steps": 2,
        "save_steps": 0,
        "rollout_batch_size": 8,
        "sequence_length": 256,
        "track_with": [],
        "train_env_manager": {"num_env_groups": 2, "group_size": 4},
        "data": {
            "train_files": str(folder / "rows.jsonl"),
            "default_agent": "gateway",
            "reward": "toy_rewards:length",
        },
        "actor_infer": {"generating_args": {"max_new_tokens": 8}},
        "actor_train": training(),
        "agent": agent,
    }
    return parse_config(values | changes, AgenticConfig)[0]


@pytest.mark.parametrize("player", ["two_turns", "openai_client"])
def test_a_blocking_function_is_trained(tiny_model: Path, tmp_path: Path, player: str) -> None:
    config = gateway_config(tiny_model, tmp_path, {"play": f"http_players:{player}"})
    folder = folder_of_run(config)
    rows = played(folder)
    num_turns = 2 if player == "two_turns" else 1
    assert len(rows) == 16
    assert {row["status"] for row in rows} == {"finished"}
    assert all(len(row["turns"]) == num_turns for row in rows)
    assert all(turn["is_trained"] for row in rows for turn in row["turns"])
    assert all(row["answer"] is not None for row in rows)
    steps = measured(folder)
    assert all(step["actor_train/grad_norm"] > 0 for step in steps)
    assert steps[0]["env/data/gateway/delivered"] == num_turns
    assert steps[0]["env/data/gateway/contexts/first"] == 1
