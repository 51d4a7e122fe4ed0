"""A run that learns nothing says why: the README's own environment with a model of random weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from turnwise.cli.main import main

ROOT = Path(__file__).parents[3]
SMALL = [
    "rollout_batch_size=8",
    "train_env_manager.num_env_groups=2",
    "train_env_manager.group_size=4",
    "sequence_length=256",
]
SMALL += ["eval_steps=0", "save_steps=0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of random weights, made as the README makes it."""
    folder = tmp_path_factory.mktemp("models") / "random"
    assert main(["make-model", "--size", "tiny", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def train(model, tmp_path, monkeypatch, capfd):
    """Trains guess.yaml; returns what was printed."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for text, name in re.findall(r"```\w+\n(# (guess\.\w+)\n.*?)```", readme, re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    def call(*overrides):
        capfd.readouterr()
        assert main(["train", "guess.yaml", f"pretrain={model}", *SMALL, *overrides]) == 0
        captured = capfd.readouterr()
        return captured.out + captured.err

    return call


def rows_of(folder):
    [file] = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_guessing_with_random_weights_says_within_three_steps_why_nothing_is_learnt(train, tmp_path):
    sentences = re.findall(r"WARNING: (after step (\d): .*reward_does_not_rise\.md.*)", train("max_steps=3"))
    assert [
        step for text, step in sentences if "of the answers held no valid action (one of them: " in text
    ] == ["2"]
    assert [
        step for text, step in sentences if "no token had an advantage" in text and "left out" in text
    ] == ["3"]
    rows = rows_of(tmp_path / "runs")
    assert [row.get("health/answers_unparsable") for row in rows] == [None, 1.0, None]
    assert [row.get("health/groups_alike") for row in rows] == [None, None, 1.0]
    assert {text for row in rows for text in row.get("health", {}).values()} == {
        text for text, _ in sentences
    }
    [log] = (tmp_path / "runs").rglob("guess*.log")
    assert all(text in log.read_text(encoding="utf-8") for text, _ in sentences)
    assert [row["actor/updates_left_out"] for row in rows] == [1.0] * 3
    assert [row["actor/backward_steps"] for row in rows] == [0.0] * 3
    assert [row["actor_train/grad_norm"] for row in rows] == [0.0] * 3, "the curve draws it"


def test_a_resumed_run_does_not_say_it_again(train, tmp_path):
    size = "custom_envs.Guess.max_tokens_per_step=4"
    assert "of the answers held no valid action" in train("max_steps=4", "save_steps=2", size)
    for newest in tmp_path.rglob("checkpoint-4"):
        newest.rename(newest.with_name("gone"))
    again = train("max_steps=4", "save_steps=2", size, "resume_from_checkpoint=true")
    assert "of the answers held no valid action" not in again
    assert again.count("no token had an advantage") == 1, "its step was played again"


def test_a_step_without_advantages_is_made_where_the_loss_has_an_entropy_bonus(train, tmp_path):
    # Random answers of a few tokens are now and then a right guess; none has this form.
    never = "custom_envs.Guess.action_pattern='<guess>(.*)</guess>'"
    printed = train("max_steps=3", "entropy_loss_coef=0.01", "custom_envs.Guess.max_tokens_per_step=4", never)
    assert "what moves the weights is only the KL or entropy term of the loss" in printed
    rows = rows_of(tmp_path / "runs")
    assert [(row["actor/updates_left_out"], row["actor/backward_steps"]) for row in rows] == [(0.0, 1.0)] * 3


COIN = """
import random

from turnwise.envs.base import TextEnv


class CoinEnv(TextEnv):
    actions = ("left", "right")
    metric_reductions = {"success": "last"}

    def reset(self, *, seed=None):
        self.wins = random.Random(seed).random() < 0.5
        return "Which way?", {}

    def step(self, action):
        return "over", float(self.wins), True, False, {"metrics": {"success": float(self.wins)}}
"""


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_success_that_asks_for_nothing_is_told_from_skill_where_environments_do_not_block(
    train, tiny_model, tmp_path, is_blocking
):
    (tmp_path / "coin.py").write_text(COIN.replace("< 0.5", "< 1.0"))
    config = "{env_type: 'coin:CoinEnv', max_steps: 1, max_tokens_per_step: 2, action_pattern: null}"
    (tmp_path / "guess.yaml").write_text(f"custom_envs:\n  Coin: {config}\n")
    printed = train(
        "max_steps=20",
        f"pretrain={tiny_model}",
        f"custom_envs.Coin.use_thread_lock={str(is_blocking).lower()}",
    )
    luck = re.findall(
        r"after step 20: so far success hasn.t risen: it is 1\.00 after 20 steps, and a player [^(]+ has "
        r"1\.00",
        printed,
    )
    assert len(luck) == (not is_blocking)


def test_an_entropy_bonus_that_wins_over_the_reward_is_said(tiny_model, tmp_path, monkeypatch, capfd):
    """A model that has learnt one answer, and a coefficient that makes noise pay more than any answer
    does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "coin.py").write_text(COIN)
    messages = [{"role": "user", "content": "Which way?"}, {"role": "assistant", "content": "left"}]
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 16)
    common = {"pretrain": str(tiny_model), "sequence_length": 64, "track_with": [], "save_steps": 0}
    teach = {"train_files": ["rows.jsonl"], "num_epochs": 12, "training_args": {"learning_rate": 0.01}}
    (tmp_path / "teach.yaml").write_text(yaml.safe_dump({**common, **teach}))
    assert main(["sft", "teach.yaml"]) == 0
    [taught] = tmp_path.glob("runs/**/checkpoint-*")
    coin = {"env_type": "coin:CoinEnv", "max_steps": 1, "max_tokens_per_step": 4, "action_pattern": None}
    coin |= {"agent_system_template": "", "agent_template": "{observation}"}
    play = {"pretrain": str(taught), "custom_envs": {"Coin": coin}, "entropy_loss_coef": 1.0, "max_steps": 14}
    play |= {
        "rollout_batch_size": 8,
        "train_env_manager": {"num_env_groups": 2, "group_size": 4},
        "eval_steps": 0,
    }
    play |= {"actor_train": {"training_args": {"learning_rate": 0.001}}}
    (tmp_path / "noise.yaml").write_text(yaml.safe_dump({**common, **play}))
    assert main(["train", "noise.yaml"]) == 0
    said = capfd.readouterr().err
    assert re.search(r"after step \d+: the entropy rose from [01]\.\d+ to [\d.]+ nats per token", said)
