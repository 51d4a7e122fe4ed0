"""Groups of answers to one row, and what a run's rewards make of them."""

from __future__ import annotations

import asyncio

import numpy as np

from turnwise.data.reward_functions import FunctionReward
from turnwise.data.rewards import RewardManager, WeightedReward
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Group, Task, Trajectory, Turn

TASK = Task(
    "train/data/0",
    "data",
    "train",
    1,
    payload={"prompt": "Say it", "reward_model": {"ground_truth": "abc"}},
    row=0,
)


def trajectory(text: str, sibling: int, task: Task = TASK, reward: float = 0.0) -> Trajectory:
    turn = Turn(
        np.array([1]),
        np.array([2]),
        np.array([-1.0], np.float32),
        text=text,
        observation="Say it",
        reward=reward,
    )
    return Trajectory(task, sibling, [turn])


def group(*texts: str) -> Group:
    return Group(TASK, [trajectory(text, sibling) for sibling, text in enumerate(texts)])


def of(function, form="text", **arguments) -> FunctionReward:
    return FunctionReward(function.__name__, function, lambda t: t.turns[-1].text, "prompt", arguments, form)


def scored(group: Group, *rewards: tuple[object, float], timeout_s: float = 60.0) -> list[Trajectory]:
    with Watchdog() as watchdog:
        manager = RewardManager(
            [WeightedReward(reward.name, weight, reward) for reward, weight in rewards], timeout_s, watchdog
        )
        return asyncio.run(manager(group))
