"""The config's own folder is searched for `module:Class`, wherever a command starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import forked
import pytest

ENV = """
from turnwise.envs.base import TextEnv
class Coin(TextEnv):
    metric_reductions = {"success": "last"}
    actions = ("heads", "tails")
    def reset(self, *, seed=None):
        return "Call it.", {}
    def step(self, action):
        return "done", 1.0, True, False, {"metrics": {"success": 1.0}}
    def expert_action(self):
        return "heads"
"""
CONFIG = """
pretrain: model
max_steps: 1
rollout_batch_size: 4
sequence_length: 256
train_env_manager: {num_env_groups: 2, group_size: 2}
custom_envs:
  Coin: {env_type: "own_coin:Coin", max_steps: 1, max_tokens_per_step: 4}
"""


@pytest.fixture(autouse=True)
def job(tmp_path: Path) -> None:
    folder = tmp_path / "j1"
    folder.mkdir()
    (folder / "own_coin.py").write_text(ENV, encoding="utf-8")
    (folder / "coin.yaml").write_text(CONFIG, encoding="utf-8")


@pytest.mark.parametrize(
    "verb",
    [
        ("play", "--policy", "scripted"),
        ("check-env", "--episodes", "3"),
        ("demos", "--policy", "random", "--episodes", "3", "--out", "x.jsonl"),
    ],
)
def test_a_verb_finds_a_class_beside_the_config(tmp_path: Path, verb: tuple[str, ...]) -> None:
    name, *options = verb
    done = turnwise(tmp_path, name, "j1/coin.yaml", *options)
    assert done.returncode == 0, done.stderr


@pytest.mark.extra
def test_training_finds_it_in_this_process_and_in_the_one_that_trains(
    tmp_path: Path, tiny_model: Path
) -> None:
    done = turnwise(tmp_path, "train", "j1/coin.yaml", f"pretrain={tiny_model}", "async_generation_ratio=1")
    assert done.returncode == 0, done.stderr


def turnwise(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[3])
    return forked.run(arguments, cwd=folder, env={**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"})
