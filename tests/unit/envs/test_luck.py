"""The measured success rate of a random player."""

from __future__ import annotations

import random
import time
from typing import ClassVar

import odd_envs
import pytest
from toy_envs import LettersEnv

from turnwise.envs.base import TextEnv
from turnwise.envs.checks.luck import MIN_EPISODES, random_outcomes


class DoorEnv(TextEnv):
    """One of four doors wins. The player may try doors until the limit."""

    actions = ("a", "b", "c", "d")
    metric_reductions: ClassVar = {"success": "last"}

    def reset(self, *, seed=None):
        self.door = random.Random(seed).choice(self.actions)
        return "choose a door", {}

    def step(self, action):
        assert action in self.actions
        hit = action == self.door
        return "open" if hit else "closed", float(hit), hit, False, {"metrics": {"success": float(hit)}}


class SlowEnv(DoorEnv):
    def reset(self, *, seed=None):
        time.sleep(0.02)
        return super().reset(seed=seed)


class HungEnv(DoorEnv):
    def step(self, action):
        odd_envs.LET_GO.wait()
        return super().step(action)


class BrokenEnv(DoorEnv):
    def step(self, action):
        raise KeyError("no such door")


class NamelessEnv(DoorEnv):
    actions = ()


class BoardEnv(DoorEnv):
    """Has actions from its first reset on."""

    actions = property(lambda self: tuple(self.doors))

    def reset(self, *, seed=None):
        self.doors = "abcd"
        return super().reset(seed=seed)


class LostBoardEnv(BoardEnv):
    actions = property(lambda self: tuple(None))


class ScorelessEnv(DoorEnv):
    metric_reductions: ClassVar = {}

    def step(self, action):
        return (*super().step(action)[:4], {})


@pytest.mark.parametrize(("env", "max_steps", "expected"), [(DoorEnv, 1, 0.25), (BoardEnv, 3, 1 - 0.75**3)])
def test_the_share_is_that_of_the_limit(env, max_steps, expected):
    outcomes = random_outcomes(env, range(400), max_steps, budget_s=60)
    assert len(outcomes) == 400 and sum(outcomes) / 400 == pytest.approx(
        expected, abs=4 * (0.25 / 400) ** 0.5
    )


@pytest.mark.parametrize("env", [HungEnv, BrokenEnv, NamelessEnv, LostBoardEnv, ScorelessEnv, LettersEnv])
def test_nothing_is_claimed_where_it_cannot_be_measured(env, nothing_stays_stuck):
    assert random_outcomes(env, range(100), 3, budget_s=60) == []


def test_what_is_too_slow_is_given_up():
    assert random_outcomes(SlowEnv, range(1000), 1, budget_s=0.1) == []
    assert len(random_outcomes(DoorEnv, range(MIN_EPISODES), 1, budget_s=60)) == MIN_EPISODES


def test_free_text_that_an_environment_draws_counts_as_chance():
    class RandomDoorEnv(DoorEnv):
        def random_action(self, rng):
            return rng.choice("ab")

    outcomes = random_outcomes(RandomDoorEnv, range(200), max_steps=1, budget_s=60.0)
    assert len(outcomes) >= MIN_EPISODES and 0.1 < sum(outcomes) / len(outcomes) < 0.45
