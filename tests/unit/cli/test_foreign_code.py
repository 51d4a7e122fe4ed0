"""Environments that misbehave in a command, in each method: an episode that failed with their name, and no lost rollout."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from turnwise.cli.main import main
from turnwise.rollout.journal import read_journal

ENV = """
import asyncio, os, random, sys
import numpy as np
from toy_envs import LettersEnv


class Odd(BaseException):
    pass


def fail(error):
    raise error


WAYS = {
    "SystemExit": lambda: sys.exit(0),
    "StopIteration": lambda: next(iter(())),
    "GeneratorExit": lambda: fail(GeneratorExit()),
    "KeyboardInterrupt": lambda: fail(KeyboardInterrupt()),
    "CancelledError": lambda: fail(asyncio.CancelledError()),
    "Odd": lambda: fail(Odd("very")),
    "ValueError": lambda: fail(ValueError("no such card")),
    "chdir": lambda: os.chdir("/"),
    "draw": lambda: (random.random(), np.random.random()),
}
made = 0


class Mine(LettersEnv):
    metric_reductions = {"success": "last"}

    def __init__(self, at="", way="", value=0.0, after=0):
        global made
        super().__init__()
        self.at, self.way, self.value, self.after = at, way, value, after
        made += 1
        self.meet("__init__")

    def meet(self, method):
        if method == self.at and made > self.after:
            WAYS[self.way]()

    def reset(self, *, seed=None):
        self.meet("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.meet("step")
        observation, reward, *rest = super().step(action)
        return observation, 10**400 if self.value == "huge" else reward + self.value, *rest

    def close(self):
        self.meet("close")


class Awaited(Mine):
    async def reset(self, *, seed=None):
        await asyncio.sleep(0)
        return super().reset(seed=seed)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


class Median(LettersEnv):
    metric_reductions = {"success": "median"}
"""


@pytest.fixture
def job(job, folder):
    """Writes a config whose environment is a class of `mine`; returns its file."""
    (folder / "mine.py").write_text(ENV)

    def write(found="Mine", manager=None, **arguments):
        manager = {"num_env_groups": 1, "group_size": 4, "max_env_retries": 0, **(manager or {})}
        env = {"env_type": f"mine:{found}", "env_config": arguments}
        return job(env, save_steps=0, train_env_manager=manager)

    return write


@pytest.mark.parametrize("way", ["SystemExit", "GeneratorExit", "KeyboardInterrupt", "CancelledError", "Odd", "StopIteration"])
@pytest.mark.parametrize("at", ["reset", "step", "close"])
@pytest.mark.parametrize("found", ["Mine", "Awaited", "threads"])
def test_what_is_no_exception_fails_its_episode(job, capsys, way, at, found):
    if found == "Awaited" and (at == "close" or way == "StopIteration"):
        pytest.skip("close is no coroutine, and Python lets no StopIteration out of one")
    manager = {"max_failed_fraction": 1.0} | ({"max_env_num_per_worker": 4} if found == "threads" else {})
    # Two are made to see whether they can be, and then the first group.
    config = job("Mine" if found == "threads" else found, manager, at=at, way=way, after=6 if at != "close" else 2)
    assert main(["rollout", config]) == 2
    captured = capsys.readouterr()
    what = "called sys.exit(0)" if way == "SystemExit" else "raised "
    assert f"{at} {what}" in captured.out and way.removesuffix("Exit") in captured.out.replace("sys.exit", "System")
    assert "Traceback" not in captured.err
    statuses = [trajectory.status for _, trajectory in read_journal(Path("rollouts.jsonl"))]
    assert statuses.count("failed") >= 4 and (at == "close" or statuses.count("truncated") + statuses.count("finished") == 4)


@pytest.mark.parametrize("way", ["SystemExit", "GeneratorExit", "CancelledError", "Odd", "ValueError"])
@pytest.mark.parametrize("at", ["__init__", "close"])
@pytest.mark.parametrize("verb", ["rollout", "train"])
def test_the_start_names_an_environment_that_can_not_be_made(job, refused, way, at, verb):
    said = refused(verb, job(at=at, way=way))
    assert "custom_envs.Letters" in said and ".py, line" in said
    assert ("sys.exit" if way == "SystemExit" else way) in said


def test_a_reduction_that_there_is_not_is_refused(job, refused):
    said = refused("train", job("Median"))
    assert "metric 'success' has reduction 'median'; allowed: mean, sum, max, min, last" in said and len(said.splitlines()) < 4


@pytest.mark.parametrize("value", [1e300, "huge", float("nan")])
def test_a_reward_that_no_float32_holds_fails_its_episode(job, refused, value):
    assert "it must be a finite number, at most 1e+30 in size" in refused("train", job(value=value))


@pytest.mark.parametrize("at", ["__init__", "step"])
def test_an_environment_may_change_the_folder(job, capsys, tmp_path, at):
    config = job(at=at, way="chdir")
    try:
        assert main(["rollout", config, "--out", "played.jsonl"]) == 0
        assert len(read_journal(tmp_path / "played.jsonl")) == 8
        os.chdir(tmp_path)
        assert main(["train", config, "max_steps=1"]) == 0
    finally:
        os.chdir(tmp_path)
    [run] = (tmp_path / "runs" / "job").iterdir()
    assert (run / "checkpoints" / "checkpoint-1").is_dir() and (run / "metrics.jsonl").read_text().count("\n") == 1
    assert "relative" not in capsys.readouterr().err


def test_deterministic_runs_seed_the_generators_that_a_users_code_may_draw_from(job):
    drawn = []
    for seed in (1, 1, 2):
        random.seed(len(drawn))
        np.random.seed(len(drawn))
        assert main(["train", job(), "max_steps=1", "deterministic=true", f"seed={seed}"]) == 0
        drawn.append((random.random(), np.random.random()))
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[2][0] and drawn[0][1] != drawn[2][1]


def test_after_a_resume_those_generators_go_on_as_without_a_stop(job):
    def run(*settings):
        random.seed(0)
        np.random.seed(0)
        assert main(["train", job(at="step", way="draw"), "deterministic=true", *settings]) == 0
        return random.random(), np.random.random()

    whole = run("output_dir=whole")
    stopped = run("max_steps=1")
    resumed = run("resume_from_checkpoint=true")
    assert resumed == whole and resumed[0] != stopped[0] and resumed[1] != stopped[1]
