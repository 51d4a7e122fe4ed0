"""Sokoban: rules and rewards worked by hand, and what is observed of a room."""

from __future__ import annotations

import numpy as np
import pytest
from messages import says

from turnwise.envs.hold_out import in_split
from turnwise.envs.players import ErringPlayer, ExpertPlayer, RandomPlayer
from turnwise.envs.sokoban.env import SokobanEnv
from turnwise.envs.sokoban.room import State, layout_hash
from turnwise.envs.sokoban.solver import shortest_solution
from turnwise.errors import EnvironmentFault
from turnwise.protocols import HasExpert, HasStateKey
from turnwise.types import Observation

CORRIDOR = ["######", "#@$ .#", "######"]
TWO_BOXES = ["#######", "#@$.  #", "#  $. #", "#     #", "#######"]


def started(rows: list[str], **arguments: object) -> SokobanEnv:
    env = SokobanEnv(room_rows=rows, **arguments)  # type: ignore[arg-type]
    env.reset(seed=0)
    return env


def play(env: SokobanEnv, *actions: str) -> list[float]:
    return [env.step(action)[1] for action in actions]


def test_a_box_is_pushed_along_a_corridor() -> None:
    env = started(CORRIDOR)
    observation, reward, terminated, truncated, info = env.step("Right")
    assert (observation, reward, terminated, truncated) == (
        "# # # # # #\n# _ P X O #\n# # # # # #",
        -0.1,
        False,
        False,
    )
    assert info["metrics"] == {
        "success": 0.0,
        "action_is_valid": 1.0,
        "action_is_effective": 1.0,
        "format_penalty": 0.0,
    }
    observation, reward, terminated, truncated, info = env.step("Right")
    assert (observation, terminated, truncated) == ("# # # # # #\n# _ _ P √ #\n# # # # # #", True, False)
    assert reward == pytest.approx(-0.1 + 1 + 10)
    assert info["metrics"]["success"] == 1.0 and info["action"] == "Right"


def test_each_reward_of_a_game_with_two_boxes() -> None:
    env = started(TWO_BOXES)
    # Right: a box comes onto its target. Right again: it leaves it.
    assert play(env, "Right", "Right") == pytest.approx([0.9, -1.1])
    env.reset(seed=0)
    # Right, then round to the left of the second box, and push it home, which ends the game.
    assert play(env, "Right", "Left", "Down", "Right") == pytest.approx([0.9, -0.1, -0.1, -0.1])
    assert not env.is_solved
    assert play(env, "Right") == pytest.approx([10.9])
    assert env.is_solved


def test_a_box_that_moves_from_target_to_target_earns_nothing() -> None:
    env = started(["#######", "#@*. $#", "#######"])
    assert play(env, "Right") == pytest.approx([-0.1])


def test_the_end_pays_once_and_holds_everything() -> None:
    env = started(CORRIDOR)
    play(env, "Right", "Right")
    before = env.state
    observation, reward, terminated, _, info = env.step("Left")
    assert (env.state, reward, terminated) == (before, -0.1, True)
    assert info["metrics"]["action_is_effective"] == 0.0 and "√" in observation


@pytest.mark.parametrize(
    ("rows", "action"),
    [
        (["####", "#@ #", "#$.#", "####"], "Up"),
        (["#####", "#.$@#", "#####"], "Right"),
        (["######", "#@$$.#", "#.   #", "######"], "Right"),
        (["#####", "#.@$#", "#####"], "Right"),
    ],
    ids=["wall ahead", "no pulling", "box behind box", "wall behind box"],
)
def test_what_cannot_move_stays(rows: list[str], action: str) -> None:
    env = started(rows)
    before = env.state
    _, reward, _, _, info = env.step(action)
    assert (env.state, reward) == (before, -0.1)
    assert info["metrics"]["action_is_valid"] == 1.0 and info["metrics"]["action_is_effective"] == 0.0


def test_the_four_words_go_where_they_say() -> None:
    env = started(["#####", "#   #", "# @ #", "#$ .#", "#####"])
    places = []
    for action in ("Up", "LEFT", " down ", "right"):
        env.step(action)
        places.append(divmod(env.state.player, 5))
    assert places == [(1, 2), (1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize("action", ["", "Jump", "1", "Up Up"])
def test_an_invalid_action_moves_nothing_and_costs_step_and_penalty(action: str) -> None:
    env = started(CORRIDOR, format_penalty=-0.25)
    before = env.state
    _, reward, terminated, truncated, info = env.step(action)
    assert (env.state, terminated, truncated, info["action"]) == (before, False, False, None)
    assert reward == pytest.approx(-0.35)
    assert info["metrics"] == {
        "success": 0.0,
        "action_is_valid": 0.0,
        "action_is_effective": 0.0,
        "format_penalty": -0.25,
    }


def test_a_player_on_a_target_has_a_symbol_of_his_own() -> None:
    env = started(["######", "#@.$.#", "#  $ #", "######"])
    assert env.step("Right")[0].splitlines()[1] == "# _ S X O #"  # type: ignore[union-attr]


def test_coordinates_name_inner_walls_targets_boxes_and_player() -> None:
    rows = ["######", "#@$ .#", "## # #", "######"]
    env = SokobanEnv(room_rows=rows, observation="coordinates")
    assert env.reset(seed=0)[0] == "#2,1 #2,3 O1,4 X1,2 P1,1"
    assert env.step("Right")[0] == "#2,1 #2,3 O1,4 X1,3 P1,2"
    assert env.step("Right")[0] == "#2,1 #2,3 O1,4 X1,4 P1,3"
    assert SokobanEnv(room_rows=CORRIDOR, observation="coordinates").reset(seed=0)[0] == "O1,4 X1,2 P1,1"
    assert (
        SokobanEnv(room_rows=TWO_BOXES, observation="coordinates").reset(seed=0)[0]
        == "O1,3 O2,4 X1,2 X2,3 P1,1"
    )
    both = SokobanEnv(room_rows=CORRIDOR, observation="both").reset(seed=0)[0]
    assert both == "# # # # # #\n# P X _ O #\n# # # # # #\nO1,4 X1,2 P1,1"


def test_the_state_key_tells_states_apart_however_they_are_reached() -> None:
    env = started(TWO_BOXES)
    start = env.state_key()
    keys = {start}
    for action in ("Down", "Right", "Up"):
        env.step(action)
        keys.add(env.state_key())
    assert len(keys) == 3, "the way up is barred by a box"
    env.reset(seed=1)
    assert env.state_key() == start
    assert started([*TWO_BOXES[:3], "#   # #", TWO_BOXES[4]]).state_key() != start
    assert isinstance(env, HasStateKey) and isinstance(env, HasExpert)


def test_the_arguments_reach_the_rooms() -> None:
    env = SokobanEnv(dim_room=[7, 9], num_boxes=2, split="val")
    env.reset(seed=0)
    assert (env.layout.height, env.layout.width, len(env.state.boxes)) == (7, 9, 2)
    assert in_split(layout_hash(env.layout), "val")
    near = SokobanEnv(search_depth=3)
    for seed in range(30):
        near.reset(seed=seed)
        assert len(shortest_solution(near.layout, near.state) or []) <= 3


def test_a_picture_shows_everything_and_changes_with_each_move() -> None:
    rows = ["#######", "#@$ .*#", "#.$   #", "#######"]
    env = SokobanEnv(room_rows=rows, render_mode="rgb_array")
    observation, _ = env.reset(seed=0)
    assert isinstance(observation, Observation) and observation.text
    [media] = observation.media
    assert media.data.shape == (4 * 32, 7 * 32, 3) and media.data.dtype == np.uint8
    places = {
        "wall": (0, 0),
        "player": (1, 1),
        "box": (1, 2),
        "floor": (1, 3),
        "target": (1, 4),
        "home": (1, 5),
    }
    tiles = {name: media.data[32 * r : 32 * r + 32, 32 * c : 32 * c + 32] for name, (r, c) in places.items()}
    assert len({tile.tobytes() for tile in tiles.values()}) == 6
    after = env.step("Down")[0]
    on_target = after.media[0].data[64:96, 32:64]
    assert all(not np.array_equal(on_target, tile) for tile in tiles.values())
    assert np.array_equal(after.media[0].data[32:64, 32:64], tiles["floor"])
    assert np.array_equal(SokobanEnv.render(started(rows)), media.data)


def test_symbols_words_and_meanings_can_be_replaced() -> None:
    env = SokobanEnv(
        room_rows=["#######", "#@$. *#", "#  .$ #", "#######"],
        grid_lookup={0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", "6": "@"},
        grid_vocab={
            "W": "stone",
            ".": "grass",
            "G": "gate",
            "C": "sheep at home",
            "B": "sheep",
            "A": "you",
            "@": "you at it",
        },
        action_lookup={"1": "North", "2": "South", "3": "West", "4": "East"},
    )
    observation, info = env.reset(seed=0)
    assert observation == "W W W W W W W\nW A B G . C W\nW . . G B . W\nW W W W W W W"
    assert "B sheep" in info["env_instruction"] and "North, South, West, East" in info["env_instruction"]
    assert env.step("east")[0].splitlines()[1] == "W . A C . C W"  # type: ignore[union-attr]


def test_the_rules_explain_what_is_shown() -> None:
    def rules(**arguments: object) -> str:
        return str(SokobanEnv(**arguments).reset(seed=0)[1]["env_instruction"])  # type: ignore[arg-type]

    assert "√ box on target" in rules() and "row,column" not in rules()
    assert "row,column" in rules(observation="both")
    assert "Symbols" not in rules(render_mode="rgb_array")
    assert rules(env_instruction="") == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"observation": "gird"},
            says("observation", "'gird'", "'grid'", "'coordinates'", "'both'"),
        ),
        ({"render_mode": "human"}, says("'text'", "'rgb_array'", "human", "render_mode")),
        ({"dim_room": [6, 6, 6]}, says("dim_room", "[6, 6, 6]")),
        ({"dim_room": 6}, says("dim_room", "6", "two whole numbers")),
        ({"dim_room": [6.0, 6]}, "two whole numbers"),
        ({"dim_room": [2, 6]}, says("dim_room", "[2, 6]", "at least 3")),
        ({"num_boxes": 0}, says("num_boxes", "0", "at least 1")),
        ({"num_boxes": "two"}, says("num_boxes", "'two'", "whole")),
        ({"search_depth": 1.5}, says("search_depth", "1.5", "whole")),
        ({"grid_lookup": "#_O√XPS"}, says("0, 1, 2, 3, 4, 5, 6", "word")),
        ({"grid_vocab": 5}, "grid_vocab 5 must say"),
        ({"grid_lookup": {0: "#", 1: "_"}}, says("grid_lookup", "0, 1, 2, 3, 4, 5, 6")),
        ({"grid_vocab": {"#": "wall"}}, says("grid_lookup", "# _ O √ X P S")),
        (
            {"action_lookup": {0: "A", 1: "B", 2: "C", 3: "D"}},
            says("action_lookup", "1, 2, 3, 4"),
        ),
        ({"action_lookup": {1: "A", 2: "a", 3: "C", 4: "D"}}, "its own word"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        SokobanEnv(**arguments)  # type: ignore[arg-type]


def test_the_expert_takes_a_shortest_solution() -> None:
    env = SokobanEnv()
    for seed in range(50):
        env.reset(seed=seed)
        expected = len(shortest_solution(env.layout, env.state) or [])
        player = ExpertPlayer(env)
        num_steps = 0
        while not env.is_solved:
            env.step(player.act())
            num_steps += 1
        assert num_steps == expected


def test_the_expert_finds_its_way_back_after_errors_until_a_box_is_stuck() -> None:
    env = started(["######", "#@   #", "# $  #", "#   .#", "######"])
    for action in ("Right", "Left", "Down"):
        env.step(action)
    for _ in range(20):
        env.step(env.expert_action())
    assert env.is_solved and env.is_solvable
    env.reset(seed=0)
    assert env.is_solvable
    env.state = State(7, frozenset({19}))
    assert env.expert_action() == "Up" and not env.is_solvable


def test_players_do_as_well_as_they_can() -> None:
    def share(make_player: object, num_rooms: int = 150, max_steps: int = 20) -> float:
        env, num_solved = SokobanEnv(), 0
        for seed in range(num_rooms):
            env.reset(seed=seed)
            player = make_player(env, seed)  # type: ignore[operator]
            num_solved += any(env.step(player.act())[2] for _ in range(max_steps))
        return num_solved / num_rooms

    expert = share(lambda env, _: ExpertPlayer(env))
    erring = share(lambda env, seed: ErringPlayer(ExpertPlayer(env), 0.5, seed))
    assert expert == 1.0
    assert 0.9 > erring > 0.5 > 0.3 > share(lambda env, seed: RandomPlayer(env, seed))
