"""Environments that misbehave in a command, in each method: an episode that failed with their name, and no
lost rollout."""

from __future__ import annotations

import os
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from messages import mentions

from turnwise.cli.main import main
from turnwise.rollout.journal import read_journal

ENV = """
import asyncio, itertools, os, random, sys
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
numbers = itertools.count(1)


class Mine(LettersEnv):
    metric_reductions = {"success": "last"}

    def __init__(self, at="", way="", value=0.0, after=0):
        super().__init__()
        self.at, self.ways, self.value, self.after = at, way.split(","), value, after
        self.number = next(numbers)
        self.meet("__init__")

    def meet(self, method):
        if method == self.at and self.number > self.after:
            WAYS[self.ways[self.number % len(self.ways)]]()

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

    def write(found="Mine", manager=None, is_locked=False, **arguments):
        manager = {"num_env_groups": 1, "group_size": 4, "max_env_retries": 0, **(manager or {})}
        env = {"env_type": f"mine:{found}", "env_config": arguments, "use_thread_lock": is_locked}
        return job(env, save_steps=0, train_env_manager=manager, rollout_batch_size=2 * manager["group_size"])

    return write


NO_EXCEPTIONS = ("SystemExit", "GeneratorExit", "KeyboardInterrupt", "CancelledError", "Odd", "StopIteration")


@pytest.mark.parametrize(
    ("found", "at"),
    [*product(("Mine", "threads"), ("reset", "step", "close")), ("Awaited", "reset"), ("Awaited", "step")],
)
def test_what_is_no_exception_fails_its_episode(job, capsys, found, at):
    """Each sibling of a group raises another."""
    ways = NO_EXCEPTIONS[
        : -1 if found == "Awaited" else None
    ]  # Python lets no StopIteration out of a coroutine
    manager = {
        "group_size": len(ways),
        "max_failed_fraction": 1.0,
    }
    # One is made to see whether it can be, and then the first group.
    after = 1 + (0 if at == "close" else len(ways))
    is_locked = found == "threads"
    found = "Mine" if is_locked else found
    config = job(found, manager, is_locked, at=at, way=",".join(ways), after=after)
    assert main(["rollout", config]) == 2
    assert "Traceback" not in capsys.readouterr().err
    played = [trajectory for _, trajectory in read_journal(Path("rollouts.jsonl"))]
    errors = [trajectory.error for trajectory in played if trajectory.status == "failed"]
    for way in ways:
        said = ("called sys.exit(0)", "") if way == "SystemExit" else ("raised ", way)
        assert any(f"{at} {said[0]}" in error and said[1] in error for error in errors), way
    assert at == "close" or len(played) - len(errors) == len(ways)


@pytest.mark.parametrize("way", ["SystemExit", "GeneratorExit", "CancelledError", "Odd", "ValueError"])
@pytest.mark.parametrize(("at", "verb"), [("__init__", "rollout"), ("close", "train")])
def test_the_start_names_an_environment_that_can_not_be_made(job, refused, way, at, verb):
    said = refused(verb, job(at=at, way=way))
    assert "custom_envs.Letters" in said and ".py, line" in said
    assert ("sys.exit" if way == "SystemExit" else way) in said


def test_a_reduction_that_there_is_not_is_refused(job, refused):
    said = refused("train", job("Median"))
    assert mentions(said, "'success'", "'median'", "mean, sum, max, min, last") and len(said.splitlines()) < 4


@pytest.mark.parametrize("value", [1e300, "huge", float("nan")])
def test_a_reward_that_no_float32_holds_fails_its_episode(job, refused, value):
    assert mentions(refused("train", job(value=value)), "finite number", "1e+30")


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
    assert (run / "checkpoints" / "checkpoint-1").is_dir() and (run / "metrics.jsonl").read_text().count(
        "\n"
    ) == 1
    assert "relative" not in capsys.readouterr().err


def test_deterministic_runs_seed_the_generators_that_a_users_code_may_draw_from(job):
    drawn = []
    for seed in (1, 1, 2):
        random.seed(len(drawn))
        np.random.seed(len(drawn))
        assert main(["train", job(), "max_steps=1", "deterministic=true", f"seed={seed}"]) == 0
        drawn.append((random.random(), np.random.random()))
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[2][0] and drawn[0][1] != drawn[2][1]


@pytest.mark.extra
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
