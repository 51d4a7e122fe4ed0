"""Games of textarena: played to their end without disturbing each other, and refused if they can't be
played."""

from __future__ import annotations

from typing import Any

import pytest
from messages import says

from turnwise.envs.textarena_env import GAMES, REFUSED, TextArenaEnv
from turnwise.errors import EnvironmentFault
from turnwise.testing.env_contract import check_env_contract

NUMBERS = "GuessTheNumber-v0"
MOVES = ("up", "1 1", "left", "A B", "1 2 3 4", "accept", "right", "C B")
SLOW = {"RushHour", "Sokoban"}
"""Games that take up to a second to start."""


def guess(env: TextArenaEnv) -> list[Any]:
    """Plays by halving the remaining interval until the game is over. Returns the steps."""
    low, high = 1, 20
    steps: list[Any] = []
    while not steps or not steps[-1][2]:
        middle = (low + high) // 2
        steps.append(env.step(str(middle)))
        low, high = (middle + 1, high) if "higher" in steps[-1][0] else (low, middle - 1)
    return steps


def test_a_game_is_won_by_who_plays_it_well() -> None:
    env = TextArenaEnv(NUMBERS)
    lengths = set()
    for seed in range(12):
        text, info = env.reset(seed=seed)
        assert text == "The game begins." and "guess the number between 1 and 20" in info["env_instruction"]
        steps = guess(env)
        assert len(steps) <= 5
        assert [step[1] for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
        assert steps[-1][2:4] == (True, False) and steps[-1][4]["metrics"]["success"] == 1.0
        assert (
            all(step[4]["metrics"]["action_is_valid"] for step in steps) and "Congratulations" in steps[-1][0]
        )
        assert all(
            step[0] in ("The target number is higher.", "The target number is lower.") for step in steps[:-1]
        )
        lengths.add(len(steps))
    assert len(lengths) > 1


def test_what_is_no_move_is_told_apart_from_what_is_no_action() -> None:
    env = TextArenaEnv(NUMBERS, format_penalty=-0.1, env_instruction="Guess.")
    first, info = env.reset(seed=3)
    assert info["env_instruction"] == "Guess."
    for _ in range(3):
        observation, reward, is_over, _, info = env.step("")
        assert (reward, is_over, info["metrics"]["action_is_valid"]) == (
            -0.1,
            False,
            0.0,
        ) and observation == first
    observation, reward, is_over, _, info = env.step("perhaps 7")
    assert (reward, is_over, info["metrics"]["action_is_valid"]) == (
        0.0,
        False,
        0.0,
    ) and "invalid move" in observation
    assert env.step("[1] or [2]")[4]["metrics"]["action_is_valid"] == 1.0
    env.step("none")
    observation, reward, is_over, _, info = env.step("none again")
    assert (
        is_over
        and 0.0 <= reward < 1.0
        and info["metrics"]["success"] == 0.0
        and "Invalid Move" in observation
    )


@pytest.mark.parametrize("game", [game for game in GAMES if game not in SLOW])
def test_every_game_passes_the_contract(game: str) -> None:
    variant = "-easy" if game == "Sudoku" else ""
    check_env_contract(lambda: TextArenaEnv(f"{game}-v0{variant}"), MOVES, seeds=(0, 7))


def test_equal_seeds_start_in_equal_states_of_a_split() -> None:
    first, second = (TextArenaEnv("LightsOut-v0", split="val") for _ in range(2))
    assert (first.reset(seed=4), first.state_key()) == (second.reset(seed=4), second.state_key())


def test_games_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    env = TextArenaEnv("LogicPuzzle-v0")
    env.reset(seed=0)
    env.step("x")
    env.step("x")
    assert capfd.readouterr() == ("", "")


def test_training_and_validation_have_different_starts() -> None:
    def starts(split: Any) -> set[str]:
        env = TextArenaEnv("LightsOut-v0", split=split)
        return {env.reset(seed=seed)[0] for seed in range(40)}

    assert not starts("train") & starts("val") and len(starts("val")) > 20
    towers = [TextArenaEnv("TowerOfHanoi-v0", split=split) for split in ("train", "val")]
    assert (
        len({tower.reset(seed=0)[0] for tower in towers}) == 1
        and sum(tower.plays_all for tower in towers) == 1
    )


def test_a_state_is_the_start_and_what_was_done_since() -> None:
    env = TextArenaEnv(NUMBERS)

    def key(seed: int, *actions: str) -> object:
        env.reset(seed=seed)
        for action in actions:
            env.step(action)
        return env.state_key()

    assert key(1, "3", "4") == key(1, "3", "", "4") != key(1, "4", "3")
    assert key(1, "3") != key(2, "3")


@pytest.mark.parametrize(
    "kwargs", [{"min_number": 9, "max_number": 2}, {"min_number": "low"}, {"max_number": None}]
)
def test_arguments_that_the_game_chokes_on_are_the_configs(kwargs: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFault, match=says("GuessTheNumber-v0", "kwargs") + ".*number"):
        TextArenaEnv(NUMBERS, kwargs=kwargs).reset(seed=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "GuessTheNumbers-v0"}, says("'GuessTheNumbers-v0'", "'GuessTheNumber-v0'")),
        ({"id": "Chess-v0"}, says("Chess-v0", "several players", "Blackjack")),
        *(
            ({"id": f"{game}-v0"}, f"textarena's {game} can't be played: it {why}")
            for game, why in REFUSED.items()
        ),
        ({"id": NUMBERS, "kwargs": {"maximum": 9}}, "GuessTheNumber-v0 with kwargs.*maximum"),
        ({"id": NUMBERS, "kwargs": 5}, says("textarena", "kwargs", "5")),
        ({"id": 5}, says("textarena", "id", "5")),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_reason(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        TextArenaEnv(**arguments)
