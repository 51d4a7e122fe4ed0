"""An ObservedEnv behaves like the environment inside, and keeps a view after each call."""

from __future__ import annotations

import asyncio
import inspect

import numpy as np
from odd_envs import SlowEnv
from toy_envs import IdentityEnv

from turnwise.envs.base import TextEnv
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.recording import ObservedEnv, View, Views
from turnwise.protocols import HasStateKey
from turnwise.types import Media, Observation

ACTIONS = ["Right", "Down", "", "Left"]


def recorded(env):
    observer = Views()
    return ObservedEnv(env, observer), observer.views


def test_nothing_changes_for_the_player():
    plain = FrozenLakeEnv(is_slippery=True)
    watched, _ = recorded(FrozenLakeEnv(is_slippery=True))
    assert watched.metric_reductions == plain.metric_reductions
    assert watched.reset(seed=3) == plain.reset(seed=3)
    for action in ACTIONS:
        assert watched.step(action) == plain.step(action)
        assert watched.state_key() == plain.state_key()
    watched.close()


def test_there_is_a_view_after_reset_and_after_each_step():
    lake = FrozenLakeEnv(is_slippery=False)
    watched, views = recorded(lake)
    watched.reset(seed=3)
    first = lake.render()
    for action in ACTIONS:
        watched.step(action)
    assert len(views) == 1 + len(ACTIONS)
    assert np.array_equal(views[0].picture, first)
    assert np.array_equal(views[-1].picture, lake.render())


def test_a_second_attempt_starts_anew():
    watched, views = recorded(IdentityEnv())
    watched.reset(seed=1)
    watched.step("a")
    watched.reset(seed=1)
    assert len(views) == 1


def test_an_environment_without_state_key_gets_none():
    assert isinstance(recorded(FrozenLakeEnv())[0], HasStateKey)
    assert not isinstance(recorded(IdentityEnv())[0], HasStateKey)


def test_an_asynchronous_environment_stays_one():
    watched, views = recorded(SlowEnv(delay_s=0.0))

    async def play():
        started = watched.reset(seed=0)
        assert inspect.isawaitable(started)
        await started
        await watched.step("x")

    asyncio.run(play())
    assert [view.picture for view in views] == ["wait", "wait"]


class Canvas(TextEnv):
    """Draws over its last picture, like many environments do."""

    def __init__(self):
        self.canvas = np.zeros((2, 2, 3), np.uint8)

    def reset(self, *, seed=None):
        return "start", {}

    def step(self, action):
        self.canvas += 1
        return "next", 0.0, False, False, {}

    def render(self):
        return self.canvas


class Unrendered(Canvas):
    def render(self):
        raise NotImplementedError


def test_a_picture_is_what_it_was_at_its_turn():
    watched, views = recorded(Canvas())
    watched.reset()
    watched.step("")
    assert [int(view.picture.max()) for view in views] == [0, 1]


def test_what_is_shown_of_an_environment():
    image = np.full((4, 4, 3), 7, np.uint8)
    watched, views = recorded(Unrendered())
    watched.reset()
    assert views[0].picture == "start"
    assert View(("text", {}), "drawn as text").picture == "drawn as text"
    assert View(("text", {}), np.zeros((4, 4))).picture == "text"
    assert np.array_equal(View((Observation("text", (Media("image", image),)), {}), None).picture, image)
