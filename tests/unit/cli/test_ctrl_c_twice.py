"""Ctrl-C twice in commands that play and train: each ends at once with status 130, one sentence, and what was
done."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import forked
import pytest
import yaml
from small_runs import write_demonstrations

from turnwise.lifecycle.checkpoint_files import all_checkpoints
from turnwise.rollout.journal import read_journal

ENV = """
import asyncio
from pathlib import Path
from toy_envs import LettersEnv

num_steps = 0

class Mine(LettersEnv):
    def __init__(self, good_steps):
        super().__init__()
        self.good_steps = good_steps

    async def reset(self, *, seed=None):
        return super().reset(seed=seed)

    async def step(self, action):
        global num_steps
        num_steps += 1
        if num_steps > self.good_steps:
            Path("begun").touch()
            await asyncio.sleep(600)
        return super().step(action)
"""
PLAYS = {"sequence_length": 256, "rollout_batch_size": 4, "val_batch_size": 4, "max_steps": 9}
MANAGER = {"num_env_groups": 1, "group_size": 2}
SFT = {
    "train_files": ["rows.jsonl"],
    "sequence_length": 64,
    "num_epochs": 1000,
    "save_steps": 1,
    "max_ckpt_to_keep": 0,
}


def plays(good_steps, **values):
    toy = {
        "env_type": "mine:Mine",
        "env_config": {"good_steps": good_steps},
        "max_steps": 1,
        "max_tokens_per_step": 4,
    }
    managers = {"train_env_manager": MANAGER, "val_env_manager": MANAGER}
    return {**PLAYS, **managers, "custom_envs": {"Toy": {**toy, "action_pattern": None}}, **values}


@pytest.fixture
def interrupted(tiny_model, tmp_path):
    """Runs a command, presses Ctrl-C twice when `is_begun`, and returns what it said."""

    def run(values, is_begun, *words):
        (tmp_path / "mine.py").write_text(ENV)
        write_demonstrations(tmp_path / "rows.jsonl", 8)
        values = {
            "pretrain": str(tiny_model),
            "output_dir": str(tmp_path / "runs"),
            "track_with": [],
            **values,
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
        words = [words[0], "job.yaml", *words[1:]]
        process = forked.Popen(words, stderr=subprocess.PIPE, cwd=tmp_path, start_new_session=True)
        try:
            while process.poll() is None and not is_begun():
                time.sleep(0.02)
            for _ in range(2):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
                time.sleep(0.1)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130, said
        assert said.count("interrupted\n") == 1 and "Traceback" not in said and "never awaited" not in said, (
            said
        )
        return said

    return run


def test_in_rollout_the_groups_that_have_ended_are_written(interrupted, tmp_path):
    interrupted(plays(good_steps=2), (tmp_path / "begun").exists, "rollout")
    assert len(read_journal(tmp_path / "rollouts.jsonl")) == 2


def test_in_eval(interrupted, tmp_path):
    interrupted(plays(good_steps=2), (tmp_path / "begun").exists, "eval", "--sampled")


def checkpoints(tmp_path):
    return [found for run in tmp_path.glob("runs/*/*") for found in all_checkpoints(run / "checkpoints")]


def test_in_sft_the_checkpoints_stay(interrupted, tmp_path):
    interrupted(SFT, lambda: checkpoints(tmp_path), "sft")
    assert checkpoints(tmp_path)


@pytest.mark.extra
def test_in_an_asynchronous_run_the_checkpoints_stay(interrupted, tmp_path):
    """The trainer is a process of its own; the second batch never ends."""
    values = plays(good_steps=6, async_generation_ratio=1, save_steps=1, entropy_loss_coef=0.001)
    interrupted(values, lambda: (tmp_path / "begun").exists() and checkpoints(tmp_path), "train")
    assert [folder.name for folder in checkpoints(tmp_path)] == ["checkpoint-1"]
