"""Players without a model."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from messages import says

from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.envs.frozen_lake.map import best_blind_path, random_map, shortest_path
from turnwise.envs.players import BlindPlayer, ErringPlayer, ExpertPlayer, Player, RandomPlayer
from turnwise.errors import EnvironmentFault


def num_steps_to_goal(env: FrozenLakeEnv, player: Player, max_steps: int = 20) -> int | None:
    for step in range(1, max_steps + 1):
        _, reward, terminated, _, _ = env.step(player.act())
        if terminated:
            return step if reward else None
    return None


def test_the_expert_on_firm_ice_is_never_longer_than_the_shortest_path() -> None:
    for seed in range(50):
        env = FrozenLakeEnv(size=5, p=0.7, is_slippery=False)
        env.reset(seed=seed)
        assert num_steps_to_goal(env, ExpertPlayer(env)) == len(shortest_path(env.rows) or [])


def test_it_finds_the_way_back_where_it_slipped() -> None:
    env = FrozenLakeEnv(map_rows=["SFFF", "FFFF", "FFFF", "FFFG"], is_slippery=True)
    env.reset(seed=0)
    assert num_steps_to_goal(env, ExpertPlayer(env), max_steps=200) is not None
    assert ExpertPlayer(env).act() in env.actions  # the episode is over: any action will do


def test_the_blind_player_gets_what_the_best_blind_path_promises() -> None:
    maps = [random_map(seed) for seed in range(200)]
    path, share = best_blind_path(maps)
    num_arrived = 0
    for rows in maps:
        env = FrozenLakeEnv(map_rows=rows, is_slippery=False)
        env.reset(seed=0)
        num_arrived += num_steps_to_goal(env, BlindPlayer(env, path)) is not None
    assert num_arrived / len(maps) == share
    assert 0.1 < share < 0.6


def test_a_blind_player_repeats_its_last_action() -> None:
    player = BlindPlayer(FrozenLakeEnv(), [1, 2])
    assert [player.act() for _ in range(4)] == ["Down", "Right", "Right", "Right"]
    with pytest.raises(ValueError, match=says("path", "at least one action")):
        BlindPlayer(FrozenLakeEnv(), [])


class EchoEnv:
    """Its actions are free text: the rest of a countdown."""

    actions = ("ignored",)
    left = 9

    def random_action(self, rng: random.Random) -> str:
        return f"{self.left} {rng.randrange(100)}"

    def expert_action(self) -> str:
        return "stop"


def test_free_text_is_drawn_for_the_present_state_unless_words_are_named() -> None:
    env = EchoEnv()
    player = RandomPlayer(env, 1)
    first = player.act()
    env.left = 3
    assert first.startswith("9 ") and player.act().startswith("3 ")
    assert RandomPlayer(env, 1).act() != first and RandomPlayer(EchoEnv(), 1).act() == first
    assert RandomPlayer(env, 1, ["named"]).act() == "named"
    erring = ErringPlayer(ExpertPlayer(env), 0.5, seed=0)
    assert {action if action == "stop" else action[:1] for action in (erring.act() for _ in range(50))} == {
        "stop",
        "3",
    }


def test_a_player_without_actions_says_so_by_its_draw() -> None:
    class Silent:
        pass

    assert not RandomPlayer(Silent(), 0).draw and RandomPlayer(EchoEnv(), 0).draw


def test_random_actions_are_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EchoEnv, "random_action", lambda self, rng: 5)
    with pytest.raises(EnvironmentFault, match=says("EchoEnv.random_action()", "5", "str")):
        RandomPlayer(EchoEnv(), 0).act()


def test_random_players_are_fixed_by_their_seed_and_uniform() -> None:
    env = FrozenLakeEnv()
    first, again, other = RandomPlayer(env, 1), RandomPlayer(env, 1), RandomPlayer(env, 2)
    actions = [first.act() for _ in range(4000)]
    assert actions == [again.act() for _ in range(4000)] != [other.act() for _ in range(4000)]
    assert all(900 < count < 1100 for count in Counter(actions).values())


@pytest.mark.parametrize("error_rate", [0.0, 0.5, 1.0])
def test_an_erring_player_replaces_a_share_of_the_actions_by_uniform_ones(error_rate: float) -> None:
    env = FrozenLakeEnv()
    player = ErringPlayer(BlindPlayer(env, [2]), error_rate, seed=0)
    counts = Counter(player.act() for _ in range(4000))
    assert counts["Right"] / 4000 == pytest.approx(1 - error_rate * 3 / 4, abs=0.04)
    assert counts["Up"] / 4000 == pytest.approx(error_rate / 4, abs=0.04)
    player._player.act = lambda: None  # type: ignore[method-assign]
    assert {player.act() for _ in range(9)} == {None}, "a player that gives up isn't made to go on"


def test_an_error_rate_is_a_probability() -> None:
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        ErringPlayer(BlindPlayer(FrozenLakeEnv(), [2]), 1.5, seed=0)
