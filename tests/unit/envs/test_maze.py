"""Mazes: walls, fixed panels and the limit of time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from messages import says

from turnwise.envs.hold_out import in_split
from turnwise.envs.maze.env import MazeEnv
from turnwise.envs.maze.map import map_hash, shortest_path
from turnwise.envs.players import ExpertPlayer, RandomPlayer
from turnwise.errors import EnvironmentFault
from turnwise.testing.env_contract import check_env_contract

ROWS = ["SFF", "WWF", "GFF"]


def test_walls_and_the_edge_stop_the_player_and_nothing_else_does() -> None:
    maze = MazeEnv(map_rows=ROWS)
    assert maze.reset(seed=0)[0] == "P _ _\n# # _\nG _ _"
    for action in ("Down", "Left", "Up"):
        observation, reward, is_over, _, info = maze.step(action)
        assert (observation, reward, is_over) == ("P _ _\n# # _\nG _ _", 0.0, False)
        assert (info["metrics"]["action_is_valid"], info["metrics"]["action_is_effective"]) == (1.0, 0.0)
    assert [maze.step(action)[1] for action in ("right", "right", "down", "down", "left")] == [0.0] * 5
    observation, reward, is_over, _, info = maze.step("left")
    assert (reward, is_over, info["metrics"]["success"]) == (1.0, True, 1.0)
    assert observation.endswith("√ _ _")
    assert maze.step("right")[1:3] == (0.0, True), "the goal is rewarded once"


def test_coordinates_name_player_goal_and_walls() -> None:
    maze = MazeEnv(map_rows=ROWS, observation="coordinates")
    assert maze.reset(seed=0)[0] == "P0,0 G2,0 #1,0 #1,1"
    assert maze.step("Right")[0] == "P0,1 G2,0 #1,0 #1,1"


def test_time_ends_the_episode_and_invalid_actions_take_time() -> None:
    maze = MazeEnv(map_rows=ROWS, time_limit=3, format_penalty=-0.5)
    maze.reset(seed=0)
    assert maze.step("fly")[1:3] == (-0.5, False)
    assert maze.step("right")[2] is False
    assert maze.step("right")[1:4] == (0.0, True, False)
    assert maze.step("down")[4]["metrics"]["action_is_effective"] == 0.0, "time is up"


def test_a_panel_has_as_many_maps_as_asked_for_in_every_environment() -> None:
    def maps(**options: Any) -> list[tuple[str, ...]]:
        maze = MazeEnv(size=6, **options)
        drawn = []
        for seed in range(100):
            maze.reset(seed=seed)
            drawn.append(maze.rows)
        return drawn

    panel = maps(num_maps=4, split="train")
    assert len(set(panel)) == 4 and panel == maps(num_maps=4, split="train")
    assert not set(panel) & set(maps(num_maps=4, split="val"))
    assert set(panel) != set(maps(num_maps=4, panel_seed=1, split="train"))
    fresh = maps(split="val")
    assert len(set(fresh)) > 90 and all(in_split(map_hash(rows), "val") for rows in fresh)


def test_the_expert_takes_the_shortest_way_and_chance_hardly_any() -> None:
    num_random = 0
    for seed in range(30):
        maze = MazeEnv(size=8, time_limit=60)
        maze.reset(seed=seed)
        shortest = len(shortest_path(maze.rows) or [])
        expert = ExpertPlayer(maze)
        results = [maze.step(expert.act()) for _ in range(shortest)]
        assert [reward for _, reward, *_ in results] == [0.0] * (shortest - 1) + [1.0]
        maze.reset(seed=seed)
        player = RandomPlayer(maze, seed)
        num_random += any(maze.step(player.act())[1] for _ in range(60))
    assert num_random < 10


def test_it_keeps_the_contract_and_draws_a_picture() -> None:
    check_env_contract(lambda: MazeEnv(size=5), ["down", "right", "nonsense"])
    maze = MazeEnv(map_rows=ROWS)
    maze.reset(seed=0)
    picture = maze.render()
    assert picture.shape == (96, 96, 3) and picture.dtype == np.uint8
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) >= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 1}, says("size 1", "at least 2")),
        ({"wall_share": 1.0}, says("wall_share 1.0", "[0, 1)")),
        ({"num_maps": 0}, says("num_maps 0", "at least 1")),
        ({"time_limit": 2.5}, says("time_limit 2.5", "whole number")),
        ({"map_rows": ["SW", "WG"]}, says("map_rows", "a way between them")),
        ({"map_rows": ["SH", "FG"]}, says("map_rows", "'SFWG'")),
    ],
)
def test_faulty_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        MazeEnv(**arguments)


def test_walls_that_leave_no_way_are_named() -> None:
    with pytest.raises(EnvironmentFault, match=says("wall_share 0.99", "lower wall_share")):
        MazeEnv(size=8, wall_share=0.99).reset(seed=0)
