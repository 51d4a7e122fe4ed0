"""Mazes: walk around walls to a goal before time is up. Nothing is deadly, and only the goal is rewarded, so
that it shows how an algorithm credits single steps of long episodes."""

from collections.abc import Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.arguments import check_count, check_type
from turnwise.envs.base import Step, episode_seed
from turnwise.envs.grid import (
    EDGE,
    FACE,
    PLAYER_COAT,
    PLAYER_FACE,
    GridEnv,
    ObservationKind,
    RenderMode,
    box,
    draw,
)
from turnwise.envs.maze.map import Map, map_hash, next_position, random_map, read_map, shortest_path
from turnwise.errors import EnvironmentFault
from turnwise.types import Observation, Split, derive_seed

GRID_VOCAB = MappingProxyType(
    {"P": "player", "_": "floor", "#": "wall", "G": "goal", "√": "player on the goal"}
)
_FLOOR, _JOINT = (236, 230, 218), (214, 206, 190)
_WALL, _COAT, _GOAL = (88, 84, 92), (205, 62, 56), (39, 158, 84)
_GOAL_BOX = box(-0.3, -0.3, 0.3, 0.3)


class MazeEnv(GridEnv):
    """A maze of `size` × `size` cells. The step that reaches the goal has reward 1 and ends the episode; any
    other valid step has reward 0. The episode ends without a reward after `time_limit` steps. Raises
    EnvironmentFault if an argument is out of range.

    A step into a wall stays in place. An action that isn't one of the four words (case doesn't matter) moves
    nothing and costs `format_penalty` (≤ 0); it takes time as well.

    Args:
        size: cells of a side, at least 2.
        wall_share: probability that a cell is a wall, in [0, 1). A map without a way is drawn again.
        num_maps: number of maps of a fixed panel, which all seeds draw from; None: each seed draws a new map.
        panel_seed: seed of the panel. It doesn't depend on the run's seed, so all runs play the same panel.
        time_limit: steps after which the episode ends; None: the agent's `max_steps` alone ends it.
        render_mode: what is observed, `text` or a picture (`rgb_array`). `render()` draws in both modes.
        observation: the form of the text: a `grid` of symbols, `coordinates` (`P0,0 G3,3 #1,2`), or `both`.
        format_penalty: reward of an invalid action.
        split: `train` or `val`: draws only maps whose *content* belongs to this split. None: draws from all
            maps.
        map_rows: one fixed map of the letters S, F, W, G, in place of `size`, `wall_share`, `num_maps` and
            `split`.
        action_lookup: number → word, for each of 0 left, 1 down, 2 right, 3 up.
        env_instruction: replaces the rules that open the first prompt; "" leaves them out.

    >>> maze = MazeEnv(map_rows=["SF", "WG"])
    >>> print(maze.reset(seed=0)[0])
    P _
    # G
    >>> maze.step("down")[:2], maze.step("Right")[1], maze.step("Down")[1:3]
    (('P _\\n# G', 0.0), 0.0, (1.0, True))
    """

    name = "maze"
    scene = "maze"
    words = MappingProxyType({0: "Left", 1: "Down", 2: "Right", 3: "Up"})

    def __init__(
        self,
        size: int = 8,
        wall_share: float = 0.3,
        num_maps: int | None = None,
        panel_seed: int = 0,
        time_limit: int | None = None,
        render_mode: RenderMode = "text",
        observation: ObservationKind = "grid",
        format_penalty: float = 0.0,
        split: Split | None = None,
        map_rows: Sequence[str] | None = None,
        action_lookup: Mapping[Any, str] | None = None,
        env_instruction: str | None = None,
    ) -> None:
        super().__init__(render_mode, observation, format_penalty, split, action_lookup)
        check_count(self.name, "size", size)
        check_type(self.name, "wall_share", wall_share, Real, "a number")
        check_type(self.name, "panel_seed", panel_seed, int, "a whole number")
        if size < 2 or not 0.0 <= wall_share < 1.0:
            raise EnvironmentFault(
                f"maze: got size {size} and wall_share {wall_share}; size must be at least 2 and wall_share "
                "in [0, 1)"
            )
        for name, count in (("num_maps", num_maps), ("time_limit", time_limit)):
            if count is not None:
                check_count(self.name, name, count)
        self._size = size
        self._wall_share = float(wall_share)
        self._num_maps = num_maps
        self._panel_seed = panel_seed
        self._time_limit = time_limit
        self._fixed_rows = None if map_rows is None else read_map(map_rows)
        if env_instruction is None:
            env_instruction = self._default_rules()
        self._instruction = env_instruction
        self._num_steps = 0
        self.rows: Map = ()
        """The map of the current episode."""
        self.position = 0
        """The player's cell: row · width + column."""

    def reset(self, *, seed: int | None = None) -> tuple[str | Observation, dict[str, Any]]:
        """Draws the map of `seed`. Without a seed, one is derived from the last episode's seed."""
        self._seed = episode_seed(seed, self._seed)
        self.rows = self._fixed_rows or random_map(
            self._map_seed(), self._size, self._wall_share, self._split
        )
        self._letters = "".join(self.rows)
        self._map_id = f"{map_hash(self.rows):016x}"
        goal = f"G{self._place(self._letters.index('G'))}"
        walls = [f"#{self._place(cell)}" for cell, letter in enumerate(self._letters) if letter == "W"]
        self._scenery = " ".join([goal, *walls])
        self.position = self._letters.index("S")
        self._num_steps = 0
        return self._observe(), {"env_instruction": self._instruction}

    def step(self, action: str) -> Step:
        if not self.rows:
            raise EnvironmentFault("MazeEnv.step came before reset; call reset(seed=…) first")
        number = self._numbers.get(action.strip().lower())
        start = self.position
        is_late = self._time_limit is not None and self._num_steps >= self._time_limit
        if number is not None and self._letters[start] != "G" and not is_late:
            self.position = next_position(self.rows, start, number)
        self._num_steps += 1
        is_success = self._letters[self.position] == "G"
        is_new = self.position != start
        is_late = self._time_limit is not None and self._num_steps >= self._time_limit
        return self._step(
            number,
            reward=float(is_new and is_success),
            is_success=is_success,
            is_effective=is_new,
            is_over=is_success or is_late,
        )

    def state_key(self) -> str:
        """The hash of the map, and the position. The time that is left isn't part of it."""
        return f"{self._map_id}:{self.position}"

    def expert_action(self) -> str:
        """The first action of a shortest path to the goal; `actions[0]` on the goal."""
        path = shortest_path(self.rows, self.position)
        return self.actions[path[0] if path else 0]

    def render(self) -> NDArray[np.uint8]:
        return draw(self._letters, len(self.rows[0]), self._paint)

    def _map_seed(self) -> int:
        if self._num_maps is None:
            return self._seed
        return derive_seed("maze", self._panel_seed, self._seed % self._num_maps)

    def _cells(self) -> tuple[list[str], int]:
        symbols = {"S": "_", "F": "_", "W": "#", "G": "G"}
        cells = [symbols[letter] for letter in self._letters]
        cells[self.position] = self._player_symbol()
        return cells, len(self.rows[0])

    def _coordinates(self) -> str:
        """Player, goal and walls as `symbol row,column`. All other cells are floor."""
        return f"{self._player_symbol()}{self._place(self.position)} {self._scenery}"

    def _player_symbol(self) -> str:
        return "√" if self._letters[self.position] == "G" else "P"

    def _place(self, position: int) -> str:
        row, column = divmod(position, len(self.rows[0]))
        return f"{row},{column}"

    def _paint(self, tile: NDArray[np.uint8], index: int, letter: str) -> None:
        tile[:] = _WALL if letter == "W" else _FLOOR
        if letter != "W":
            tile[EDGE] = _JOINT
        if letter == "G":
            tile[_GOAL_BOX] = _GOAL
        if index == self.position:
            tile[PLAYER_COAT] = _COAT
            tile[PLAYER_FACE] = FACE

    def _default_rules(self) -> str:
        rules = self._rules(
            "You are in a maze. Walk to the goal.",
            GRID_VOCAB.items(),
            "; the rest is floor.",
            "; walls and the edge of the maze stop you.",
        )
        if self._time_limit is not None:
            rules += f"\nYou have {self._time_limit} steps."
        return rules
