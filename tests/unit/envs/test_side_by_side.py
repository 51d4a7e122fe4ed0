"""Episodes of packages' environments played at the same time, turn by turn: each is the same as alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from turnwise.envs.registry import make_env

SEEDS = (3, 4)
EPISODES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Taxi, random": (
        "gymnasium",
        {"id": "Taxi-v4", "kwargs": {"is_rainy": True, "fickle_passenger": True}},
        "south east west",
    ),
    "CliffWalking, random": (
        "gymnasium",
        {"id": "CliffWalking-v1", "kwargs": {"is_slippery": True}},
        "up right right",
    ),
    "Blackjack of gymnasium": ("gymnasium", {"id": "Blackjack-v1"}, "hit hit hit"),
    "MiniGrid": (
        "gymnasium",
        {"id": "minigrid:MiniGrid-Dynamic-Obstacles-5x5-v0"},
        "left left right forward",
    ),
    "2048": ("textarena", {"id": "2048-v0"}, "left down right down"),
    "Blackjack of textarena": ("textarena", {"id": "Blackjack-v0"}, "stand stand stand"),
    "RushHour": ("textarena", {"id": "RushHour-v0"}, "A+ A- X+"),
    "pool_matrix": ("reasoning_gym", {"dataset": "pool_matrix", "num_attempts": 3}, "1 2 3"),
    "number_sequence": ("reasoning_gym", {"dataset": "number_sequence", "num_attempts": 3}, "1 2 3"),
}


def playing(name: str, seed: int) -> Iterator[tuple[Any, ...]]:
    """Yields the result of each call of an episode, and the state key after it."""
    kind, arguments, words = EPISODES[name]
    env = make_env(kind, {"split": None, **arguments}, "train")
    yield env.reset(seed=seed), env.state_key()
    for word in words.split():
        result = env.step(word)
        yield result, env.state_key()
        if result[2] or result[3]:
            break
    env.close()


def streams() -> tuple[Any, ...]:
    """The states of the random generators that the whole process shares."""
    _, words, *rest = np.random.get_state()
    return random.getstate(), words.tolist(), rest


@pytest.mark.parametrize("name", EPISODES)
def test_an_episode_is_the_same_alone_and_beside_another_and_leaves_no_trace(name: str) -> None:
    alone = {seed: list(playing(name, seed)) for seed in SEEDS}
    assert alone[SEEDS[0]] != alone[SEEDS[1]] and all(len(moments) > 1 for moments in alone.values())
    together: dict[int, list[Any]] = {seed: [] for seed in SEEDS}
    episodes = {seed: playing(name, seed) for seed in SEEDS}
    for noise in range(2 * max(map(len, alone.values()))):
        seed = SEEDS[noise % 2]
        random.seed(noise)
        np.random.seed(noise)
        before = streams()
        together[seed] += [moment for moment in [next(episodes[seed], None)] if moment]
        assert streams() == before
    assert together == alone
