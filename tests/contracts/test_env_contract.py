"""Environments pass the contract check, and the check finds what it is for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from odd_envs import NaNEnv, RaisingEnv, SlowEnv, WrongTupleEnv
from toy_envs import BanditEnv, IdentityEnv

from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.gymnasium.env import GymnasiumEnv
from turnwise.envs.sokoban.env import SokobanEnv
from turnwise.errors import EnvironmentFault
from turnwise.protocols import Env
from turnwise.testing.env_contract import check_env_contract

MOVES = ["Right", "down", "Jump", "Down", "Left", "Right", "Down", "Right"]
DRIVES = ["south", "pickup", "north", "east", "fly", "dropoff", "west", "West"]
WALKS = ["forward", "left", "forward", "toggle", "pickup", "right", "forward", "drop", "done", "forward"]
TOKENS = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("make_env", "actions"),
    [
        (partial(FrozenLakeEnv, is_slippery=False), MOVES),
        (partial(FrozenLakeEnv, size=8, observation="both", split="val"), MOVES),
        (partial(FrozenLakeEnv, observation="coordinates", format_penalty=-0.1, split="train"), MOVES),
        (partial(FrozenLakeEnv, render_mode="rgb_array"), MOVES),
        (SokobanEnv, MOVES),
        (partial(SokobanEnv, dim_room=[8, 8], num_boxes=2, observation="both", split="val"), MOVES),
        (partial(SokobanEnv, observation="coordinates", format_penalty=-0.1, split="train"), MOVES),
        (partial(SokobanEnv, render_mode="rgb_array", room_rows=["#####", "#@$.#", "#####"]), MOVES),
        (partial(GymnasiumEnv, "Taxi-v4", kwargs={"is_rainy": True, "fickle_passenger": True}), DRIVES),
        (partial(GymnasiumEnv, "Taxi-v4", renderer="ansi", format_penalty=-1.0, split="val"), DRIVES),
        (partial(GymnasiumEnv, "CliffWalkingSlippery-v1", render_mode="rgb_array"), MOVES),
        (partial(GymnasiumEnv, "FrozenLake-v1", renderer="ansi"), MOVES),
        (partial(GymnasiumEnv, "Blackjack-v1", split="train"), ["hit", "hit", "stick"]),
        (partial(GymnasiumEnv, "CartPole-v1"), ["left", "right", "jump", "right"] * 5),
        (partial(GymnasiumEnv, "minigrid:MiniGrid-MultiRoom-N2-S4-v0"), WALKS),
        (
            partial(GymnasiumEnv, "minigrid:MiniGrid-Dynamic-Obstacles-5x5-v0", renderer="minigrid_full"),
            WALKS,
        ),
        (partial(GymnasiumEnv, "minigrid:MiniGrid-Fetch-5x5-N2-v0", split="val"), WALKS),
        (
            partial(
                GymnasiumEnv, "minigrid:BabyAI-GoToRedBall-v0", render_mode="rgb_array", renderer="minigrid"
            ),
            WALKS,
        ),
        (BanditEnv, TOKENS),
        (IdentityEnv, TOKENS),
        (partial(SlowEnv, delay_s=0.0), TOKENS),
    ],
)
def test_the_environments_of_the_package_pass(make_env: Callable[[], Env], actions: list[str]) -> None:
    check_env_contract(make_env, actions)


class ForgetfulEnv(BanditEnv):
    """An environment whose observation depends on how often it was reset."""

    def __init__(self) -> None:
        super().__init__()
        self._resets = itertools.count()

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"episode {next(self._resets)}", {}


def bandit(**attributes: Any) -> type[BanditEnv]:
    return type("OddEnv", (BanditEnv,), attributes)


@pytest.mark.parametrize(
    ("make_env", "message"),
    [
        (NaNEnv, "NaNEnv, turn 1: the reward is nan .* finite number"),
        (WrongTupleEnv, "WrongTupleEnv, turn 1: got a tuple of 4; step returns"),
        (ForgetfulEnv, "ForgetfulEnv: seed 0 gave another episode after a reset, at the start: text"),
        (bandit(state_key=lambda self: ([0],)), "hashable"),
        (bandit(metric_reductions={}), "metric 'success' isn't declared"),
        (bandit(reset=lambda self, seed: (3, {})), "OddEnv, reset: the observation is a int"),
        (bandit(metric_reductions={"success": "median"}), "reduction 'median'"),
    ],
)
def test_what_breaks_the_contract_is_found(make_env: Callable[[], Env], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        check_env_contract(make_env, TOKENS)


def test_an_exception_of_the_environment_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="the toy is broken"):
        check_env_contract(RaisingEnv, TOKENS)
