"""The whole library learns with a critic from random weights, by turn and (the tool) by token; flipped, its
policy unlearns."""

from __future__ import annotations

import pytest
from climbed import climb
from small_runs import LETTERS, run_small, small_config, training

from turnwise import RLTrainingTool
from turnwise.tracking.jsonl import read_metrics


def train(tiny_model, tmp_path, flip):
    """The metrics of the steps: letters are worth their share of lower-case ones, in two turns."""
    config = small_config(
        tiny_model,
        tmp_path,
        max_steps=15,
        save_steps=0,
        rollout_batch_size=64,
        sequence_length=128,
        adv_estimator="gae",
        gae_granularity="turn",
        critic_warmup=2,
        whiten_advantages=True,
        actor_train=training(1e-2, 64),
        critic=training(1e-2, 16),
        train_env_manager={"num_env_groups": 64, "group_size": 1},
        custom_envs={"Letters": {**LETTERS, "max_tokens_per_step": 1, "agent_system_template": ""}},
    )
    return read_metrics(run_small(config, **({"change": climb} if flip else {})).folder.metrics)


@pytest.mark.parametrize("flip", [False, pytest.param(True, marks=pytest.mark.extra)])
def test_ppo_learns_to_write_small_letters(tiny_model, tmp_path, flip):
    rows = train(tiny_model, tmp_path, flip)
    first, last = (rows[step]["rollout/score/mean"] for step in (0, -1))
    if flip:
        assert last < 0.5 * first
    else:
        assert first < 0.5 and last > 1.2
        assert rows[0]["critic/values/mean"] == 0.0, "a new head starts at 0"
        assert rows[-1]["critic/values/mean"] == pytest.approx(rows[-1]["critic/returns/mean"], abs=0.35)


def small_letters(completions, **columns):
    return [sum(letter.islower() for letter in text) / max(len(text), 1) for text in completions]


def test_ppo_of_the_tool_learns_with_its_own_defaults(tiny_model, tmp_path):
    """Only sizes and the actor's rate are given: the critic's rate and what an advantage is are the
    tool's."""
    answer = RLTrainingTool().run_dict(
        {
            "action": "train",
            "algorithm": "ppo",
            "model_name": str(tiny_model),
            "dataset": [{"prompt": f"P _ {i} O"} for i in range(64)],
            "custom_reward": small_letters,
            "output_dir": str(tmp_path / "ppo"),
            "batch_size": 64,
            "num_epochs": 12,
            "max_new_tokens": 4,
            "learning_rate": 1e-2,
            "use_lora": False,
            "use_tensorboard": False,
        }
    )
    assert answer["status"] == "success", answer
    [run] = (tmp_path / "ppo" / "run").glob("2*")
    rows = read_metrics(run / "metrics.jsonl")
    first, last = (rows[step]["rollout/score/mean"] for step in (0, -1))
    assert first < 0.4 and last > 0.6, (first, last)
    assert rows[0]["critic/values/mean"] == 0.0
    assert rows[-1]["critic/values/mean"] == pytest.approx(rows[-1]["critic/returns/mean"], abs=0.35)
