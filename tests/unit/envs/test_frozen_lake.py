"""FrozenLake: it has gymnasium's dynamics, and shows them as text or pictures."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymFrozenLake
from messages import says

from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.frozen_lake.map import random_map
from turnwise.errors import EnvironmentFault
from turnwise.types import Observation, derive_seed

WORDS = ("Left", "Down", "Right", "Up")
SMALL = ["SFF", "FHF", "FFG"]


def gym_lake(rows: list[str], is_slippery: bool) -> GymFrozenLake:
    return GymFrozenLake(desc=list(rows), is_slippery=is_slippery)


@pytest.mark.parametrize("is_slippery", [False, True])
def test_the_same_actions_on_the_same_maps_give_what_gymnasium_gives(is_slippery: bool) -> None:
    num_arrived = 0
    for seed in range(60):
        size = 3 + seed % 4
        ours = FrozenLakeEnv(size=size, is_slippery=is_slippery)
        ours.reset(seed=seed)
        theirs = gym_lake(list(ours.rows), is_slippery)
        state, _ = theirs.reset(seed=seed)
        theirs.np_random = np.random.default_rng(derive_seed(seed, "slips"))
        assert state == ours.position
        for action in np.random.default_rng(seed).choice(4, 60, p=[0.1, 0.4, 0.4, 0.1]).tolist():
            state, reward, terminated, truncated, _ = theirs.step(action)
            _, our_reward, our_terminated, our_truncated, _ = ours.step(WORDS[action])
            assert (ours.position, our_reward, our_terminated, our_truncated) == (
                state,
                reward,
                terminated,
                truncated,
            )
            num_arrived += reward
            if terminated:
                break
    assert num_arrived > 0


def test_slipping_has_the_probabilities_of_gymnasiums_table() -> None:
    table = gym_lake(SMALL, is_slippery=True).P
    lake = FrozenLakeEnv(map_rows=SMALL)
    lake.reset(seed=0)
    num_draws = 3000
    for position, action in itertools.product([0, 2, 3, 7], range(4)):
        expected: Counter[int] = Counter()
        for probability, state, _, _ in table[position][action]:
            expected[state] += probability
        seen: Counter[int] = Counter()
        for _ in range(num_draws):
            lake.position = position
            lake.step(WORDS[action])
            seen[lake.position] += 1
        assert set(seen) == set(expected)
        for state, probability in expected.items():
            # Five standard deviations of a binomial share.
            assert (
                abs(seen[state] / num_draws - probability)
                < 5 * (probability * (1 - probability) / num_draws) ** 0.5 + 1e-9
            )


def test_the_grid_shows_player_ice_holes_and_goal() -> None:
    lake = FrozenLakeEnv(map_rows=SMALL, is_slippery=False)
    assert lake.reset(seed=0)[0] == "P _ _\n_ O _\n_ _ G"
    assert lake.step("Right")[0] == "_ P _\n_ O _\n_ _ G"
    assert lake.step("Down")[0] == "_ _ _\n_ X _\n_ _ G"
    lake.reset(seed=0)
    for action in ("Down", "Down", "Right", "Right"):
        observation, reward, terminated, truncated, _ = lake.step(action)
    assert (observation, reward, terminated, truncated) == ("_ _ _\n_ O _\n_ _ √", 1.0, True, False)


def test_coordinates_name_the_same_things() -> None:
    lake = FrozenLakeEnv(map_rows=SMALL, is_slippery=False, observation="coordinates")
    assert lake.reset(seed=0)[0] == "P0,0 G2,2 O1,1"
    assert lake.step("right")[0] == "P0,1 G2,2 O1,1"
    assert FrozenLakeEnv(map_rows=["SF", "FG"], observation="coordinates").reset(seed=0)[0] == "P0,0 G1,1"
    both = FrozenLakeEnv(map_rows=SMALL, observation="both").reset(seed=0)[0]
    assert both == "P _ _\n_ O _\n_ _ G\nP0,0 G2,2 O1,1"


@pytest.mark.parametrize("action", ["", "Jump", "2", "Left Left"])
def test_an_invalid_action_moves_nothing_costs_the_penalty_and_goes_on(action: str) -> None:
    lake = FrozenLakeEnv(map_rows=SMALL, format_penalty=-0.25)
    before = lake.reset(seed=0)[0]
    observation, reward, terminated, truncated, info = lake.step(action)
    assert (observation, reward, terminated, truncated) == (before, -0.25, False, False)
    assert info["action"] is None
    assert info["metrics"] == {
        "success": 0.0,
        "action_is_valid": 0.0,
        "action_is_effective": 0.0,
        "format_penalty": -0.25,
    }


def test_a_valid_action_pays_no_penalty_and_tells_whether_it_moved() -> None:
    lake = FrozenLakeEnv(map_rows=SMALL, is_slippery=False, format_penalty=-0.25)
    lake.reset(seed=0)
    bumped, moved = lake.step(" LEFT "), lake.step("down")
    assert bumped[1] == moved[1] == 0.0
    assert bumped[4]["action"] == "Left"
    assert bumped[4]["metrics"] == {
        "success": 0.0,
        "action_is_valid": 1.0,
        "action_is_effective": 0.0,
        "format_penalty": 0.0,
    }
    assert moved[4]["metrics"]["action_is_effective"] == 1.0


def test_the_goal_pays_once() -> None:
    lake = FrozenLakeEnv(map_rows=["SG"], is_slippery=False)
    lake.reset(seed=0)
    assert lake.step("Right")[1:3] == (1.0, True)
    assert lake.step("Left")[1:3] == (0.0, True)


def test_the_state_key_tells_maps_and_positions_apart_and_nothing_else() -> None:
    lake = FrozenLakeEnv(is_slippery=False, render_mode="rgb_array")
    lake.reset(seed=1)
    start = lake.state_key()
    lake.step("Jump")
    assert lake.state_key() == start
    lake.reset(seed=2)
    assert random_map(1) != random_map(2) and lake.state_key() != start
    lake.reset(seed=1)
    lake.step("Right")
    lake.step("Down")
    assert lake.state_key() != start
    twin = FrozenLakeEnv()
    twin.reset(seed=1)
    assert twin.state_key() == start


def test_the_seed_fixes_the_slips_and_another_seed_slips_elsewhere() -> None:
    def walk(seed: int) -> list[int]:
        lake.reset(seed=seed)
        return [lake.step("Right")[0] and lake.position for _ in range(30)]

    lake = FrozenLakeEnv(map_rows=["FFFFF", "FFSFF", "FFFFF", "FFFFG"])
    assert walk(5) == walk(5) != walk(6)


def test_a_picture_shows_player_holes_and_goal_and_changes_with_each_move() -> None:
    lake = FrozenLakeEnv(map_rows=SMALL, is_slippery=False, render_mode="rgb_array")
    observation, _ = lake.reset(seed=0)
    assert isinstance(observation, Observation) and observation.text
    [media] = observation.media
    assert media.data.shape == (96, 96, 3) and media.data.dtype == np.uint8
    tiles = {
        name: media.data[32 * r : 32 * r + 32, 32 * c : 32 * c + 32]
        for name, r, c in [("player", 0, 0), ("ice", 0, 1), ("hole", 1, 1), ("goal", 2, 2)]
    }
    assert len({tile.tobytes() for tile in tiles.values()}) == 4
    assert np.array_equal(lake.step("Right")[0].media[0].data[:32, 32:64], tiles["player"])
    assert not np.array_equal(lake.step("Down")[0].media[0].data[32:64, 32:64], tiles["hole"])


def test_symbols_and_words_can_be_replaced() -> None:
    vocab = {"@": "you", ".": "ice", "H": "hole", "*": "goal", "x": "you in a hole", "!": "you on the goal"}
    lake = FrozenLakeEnv(
        map_rows=SMALL,
        is_slippery=False,
        grid_vocab=vocab,
        action_lookup={"0": "W", "1": "S", "2": "E", "3": "N"},
    )
    observation, info = lake.reset(seed=0)
    assert observation == "@ . .\n. H .\n. . *"
    assert "@ you" in info["env_instruction"] and "W, S, E, N" in info["env_instruction"]
    assert lake.step("e")[0] == ". @ .\n. H .\n. . *"


def test_the_rules_say_slippery_only_where_it_is() -> None:
    slippery = FrozenLakeEnv(is_slippery=True).reset(seed=0)[1]["env_instruction"]
    firm = FrozenLakeEnv(is_slippery=False).reset(seed=0)[1]["env_instruction"]
    assert "slippery" in slippery and "slippery" not in firm
    assert FrozenLakeEnv(env_instruction="").reset(seed=0)[1]["env_instruction"] == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"observation": "gird"}, says("'grid'", "'coordinates'", "'both'", "gird")),
        ({"render_mode": "human"}, says("'text'", "'rgb_array'", "human", "render_mode")),
        ({"grid_vocab": {"P": "player"}}, "six symbols"),
        ({"grid_vocab": "P_OGX√"}, "six symbols"),
        ({"action_lookup": ["Left", "Down", "Right", "Up"]}, says("0, 1, 2, 3", "word")),
        ({"size": "big"}, says("size", "'big'", "at least 1")),
        ({"size": 1}, says("size", "at least 2")),
        ({"p": "0.8"}, says("p", "'0.8'", "number")),
        ({"is_slippery": "false"}, says("is_slippery", "'false'", "true or false")),
        ({"map_rows": "SFFG"}, says("map_rows", "'SFFG'", "list")),
        ({"action_lookup": {0: "A", 1: "a", 2: "B", 3: "C"}}, "its own word"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        FrozenLakeEnv(**arguments)  # type: ignore[arg-type]
