"""MiniGrid (Chevalier-Boisvert et al. 2023, arXiv:2306.13831) as a grid of symbols."""

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.hold_out import fingerprint

UNSEEN, EMPTY, WALL, FLOOR, DOOR, KEY, BALL, BOX, GOAL, LAVA, AGENT = range(11)
PLAIN = {UNSEEN: "?", EMPTY: ".", WALL: "#", FLOOR: ".", GOAL: "G", LAVA: "~", AGENT: "."}
OBJECTS = {KEY: "k", BALL: "b", BOX: "x"}
DOORS = "odl"
"""Letters of doors: open, closed, locked."""
COLOURS = "rgbpye"
LOOKS = ">v<^"
"""Symbols of the agent by its direction."""
DIRECTIONS = ("east", "south", "west", "north")


def partial_view(observation: Any, env: Any) -> str:
    """What the agent sees, turned so that the agent looks up from the middle of the last row."""
    view = observation["image"]
    rows = _rows(view)
    rows[-1][len(view) // 2] = LOOKS[3]
    return _described(rows, observation, env)


def full_view(observation: Any, env: Any) -> str:
    """The whole grid, north at the top."""
    state = env.unwrapped
    rows = _rows(state.grid.encode())
    column, row = state.agent_pos
    rows[row][column] = LOOKS[state.agent_dir]
    return _described(rows, observation, env)


def state_key(env: Any) -> Hashable:
    """The grid with the contents of its boxes, the agent with what it carries, and the mission."""
    state = env.unwrapped
    hidden = []
    for cell, item in enumerate(state.grid.grid):
        if item and item.contains:
            hidden.append((cell, _described_item(item.contains)))
    column, row = state.agent_pos
    agent = [int(column), int(row), int(state.agent_dir), _described_item(state.carrying)]
    return fingerprint([state.grid.encode(), hidden, agent, state.mission])


def _rows(cells: NDArray[np.uint8]) -> list[list[str]]:
    """The symbol of each cell, by row and column. `cells` [columns, rows, 3] holds the numbers of object,
    colour and state."""
    return [[_symbol(*cell) for cell in row] for row in cells.transpose(1, 0, 2).tolist()]


def _symbol(kind: int, colour: int, state: int) -> str:
    if kind in PLAIN:
        return PLAIN[kind]
    letter = DOORS[state] if kind == DOOR else OBJECTS[kind]
    return letter + COLOURS[colour]


def _described(rows: list[list[str]], observation: Any, env: Any) -> str:
    grid = "\n".join(" ".join(row) for row in rows)
    direction = DIRECTIONS[observation["direction"]]
    carried = _described_item(env.unwrapped.carrying) or "nothing"
    return f"{grid}\nfacing {direction}, carrying {carried}. Mission: {observation['mission']}"


def _described_item(item: Any) -> str:
    """An object as `yellow key`; "" for None."""
    if not item:
        return ""
    return f"{item.color} {item.type}"
