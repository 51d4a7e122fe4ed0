"""Pictures of validation episodes: of the right ones, whole, and without a trace in what was played."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scripted_conversation import ScriptedConversation
from small_runs import run_small, small_config

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.assemble.saved import evaluate_model
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.recording import View
from turnwise.examine.examined import examine
from turnwise.pipelines.pictures import NUM_RECORDED, Pictures, frames
from turnwise.tracking.jsonl import read_metrics
from turnwise.types import Group, SamplingParams, Task, Trajectory, Turn

SETTINGS = EnvAgentSettings(tag="Lake/a", action_pattern=None)
TASK = Task(id="val/Lake/0", tag="Lake/a", split="val", seed=7)


def lake(task):
    return FrozenLakeEnv(map_rows=["SF", "FG"], is_slippery=False)


def build(make_env):
    return EnvAgent(make_env, SETTINGS)


def play(agent, texts, task=TASK, sibling=0):
    opened = agent.run(
        task, sibling, lambda *_, **__: ScriptedConversation(texts), SamplingParams(max_new_tokens=8)
    )
    return Group(task, asyncio.run(opened), index=3)


def record(folder, texts, build=build):
    """The pictures of an episode, and its group."""
    pictures = Pictures(folder, [TASK.id])
    return pictures, play(pictures.recorded(build, lake), texts)


def test_the_recorded_episode_is_written_and_no_other(tmp_path):
    pictures = Pictures(tmp_path, [TASK.id])
    agent = pictures.recorded(build, lake)
    recorded = play(agent, ["Right", "Up", "Down"])
    others = [play(agent, ["Down"], sibling=1), play(agent, ["Down"], task=replace(TASK, id="val/Lake/9"))]
    [path] = pictures.write("step-20", [recorded, *others])
    assert path == tmp_path / "step-20" / "Lake_a-3-1.00.gif"
    assert list(tmp_path.rglob("*.*")) == [path]
    with Image.open(path) as image:
        assert image.n_frames == 1 + 3
    assert pictures.write("step-40", [recorded]) == [], "an episode is written once"


def test_a_frame_has_the_text_of_its_turn():
    pictures, group = record(None, ["Right", "Down"])
    [trajectory] = group.trajectories
    start, first, last = frames(trajectory, pictures._recordings[TASK.id].views)
    assert start.caption == () and "before turn 1 of 2" in start.title
    assert first.caption == (
        ("saw", "P _\n_ G"),
        ("said", "Right"),
        ("did", "Right"),
        ("reward", "0, 0 so far"),
    )
    assert last.caption == (("saw", "_ P\n_ G"), ("said", "Down"), ("did", "Down"), ("reward", "1, 1 so far"))
    assert "turn 2 of 2: finished" in last.title
    goal = FrozenLakeEnv(map_rows=["SF", "FG"], is_slippery=False)
    goal.reset()
    goal.position = 3
    assert np.array_equal(last.picture, goal.render())


def test_an_unparsed_action_and_a_limit_are_said():
    turn = Turn(np.arange(1), np.arange(1), np.zeros(1, np.float32), text="hm", observation="P", action=None)
    trajectory = Trajectory(TASK, 0, [turn], status="truncated", limit="max_steps")
    _, frame = frames(trajectory, [View(("P", {}), None), View(("P", 0.0), None)])
    assert ("did", "nothing that could be parsed") in frame.caption
    assert frame.title.endswith("turn 1 of 1: truncated by max_steps")


class TwoEnvs:
    """An agent that doesn't play its environment turn by turn."""

    def __init__(self, make_env):
        self._make_env = make_env

    async def run(self, task, sibling, open_conversation, sampling):
        env = self._make_env(task)
        env.reset(seed=task.seed)
        for _ in range(3):
            env.step("Right")
        return [Trajectory(task, sibling, [Turn(np.arange(1), np.arange(1), np.zeros(1, np.float32))])]


@pytest.mark.parametrize(
    ("place", "make_agent", "said"),
    [("free", TwoEnvs, "isn't played turn by turn"), ("file", build, "render_save_dir")],
)
def test_an_agent_that_plays_otherwise_or_no_place_to_write_costs_the_pictures_only(
    tmp_path, caplog, place, make_agent, said
):
    (tmp_path / "file").write_text("in the way")
    pictures, group = record(tmp_path / place, ["Right"], make_agent)
    with caplog.at_level(logging.WARNING):
        assert pictures.write("step-0", [group]) == []
    assert said in caplog.text


def test_a_failed_episode_has_no_picture(tmp_path):
    pictures, group = record(tmp_path, ["Right"])
    group.trajectories = [Trajectory(TASK, 0, status="failed", error="boom")]
    assert pictures.write("step-0", [group]) == []


def config_of(tiny_model, tmp_path, name, **changes):
    lake = {"env_type": "frozen_lake", "env_config": {"size": 3}, "max_steps": 3, "max_tokens_per_step": 4}
    own = {
        "exp_name": name,
        "max_steps": 1,
        "eval_steps": 1,
        "rollout_batch_size": 4,
        "val_batch_size": 12,
        "sequence_length": 512,
        "train_env_manager": {"num_env_groups": 2, "group_size": 2},
        "val_env_manager": {"num_env_groups": 6, "group_size": 2},
        "custom_envs": {"Lake": lake},
    }
    return small_config(tiny_model, tmp_path / "runs", **own | changes)


def validated(config):
    folder = run_small(config).folder
    return folder, [
        {k: v for k, v in row.items() if k.startswith("val/")} for row in read_metrics(folder.metrics)
    ]


def test_a_run_writes_them_at_each_validation_and_measures_the_same(tiny_model, tmp_path):
    _, plain = validated(config_of(tiny_model, tmp_path, "plain"))
    folder, recorded = validated(
        config_of(tiny_model, tmp_path, "recorded", render_save_dir=str(tmp_path / "pictures"))
    )
    assert recorded == plain
    for step in (0, 1):
        paths = sorted((tmp_path / "pictures" / "recorded" / folder.path.name / f"step-{step}").iterdir())
        assert len(paths) == NUM_RECORDED
        for path in paths:
            with Image.open(path) as image:
                assert image.format == "GIF" and 2 <= image.n_frames <= 1 + 3


def test_an_evaluation_writes_them_too_and_measures_the_same(tiny_model, tmp_path):
    plain = evaluate_model(examine(config_of(tiny_model, tmp_path, "plain")))
    recorded = evaluate_model(
        examine(config_of(tiny_model, tmp_path, "seen", render_save_dir=str(tmp_path / "pictures")))
    )
    assert recorded == plain
    assert (
        len(list((tmp_path / "pictures" / "seen" / "eval" / tiny_model.name).glob("Lake-*.gif")))
        == NUM_RECORDED
    )
