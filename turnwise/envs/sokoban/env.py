"""Sokoban: push every box onto a target. Rules and rewards are those of the package gym-sokoban (Schrader
2018). The package isn't needed, and a step takes microseconds."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.arguments import words_by_number
from turnwise.envs.base import Step, episode_seed
from turnwise.envs.grid import GridEnv, ObservationKind, RenderMode
from turnwise.envs.sokoban.picture import draw_room
from turnwise.envs.sokoban.room import (
    BOX,
    PLAYER,
    TARGET,
    WALL,
    Layout,
    State,
    cell_numbers,
    check_room_arguments,
    inner_walls,
    layout_hash,
    move,
    random_room,
    read_room,
)
from turnwise.envs.sokoban.solver import shortest_solution
from turnwise.errors import EnvironmentFault
from turnwise.types import Observation, Split

GRID_LOOKUP = MappingProxyType({0: "#", 1: "_", 2: "O", 3: "√", 4: "X", 5: "P", 6: "S"})
MEANINGS = ("wall", "floor", "target", "box on target", "box", "player", "player on target")
STEP_REWARD = -0.1
TARGET_REWARD = 1.0
SOLVED_REWARD = 10.0


class SokobanEnv(GridEnv):
    """A solvable room, drawn from the seed. The episode ends when every box is on a target. Raises
    EnvironmentFault if an argument is out of range.

    Rewards: −0.1 per step, +1 for a box that comes onto a target, −1 for a box that leaves one, +10 when all
    are on targets. An action that isn't one of the four words (case doesn't matter) moves nothing and earns
    −0.1 plus `format_penalty` (≤ 0); the episode continues. The environment has no step limit of its own; the
    agent has `max_steps`.

    Args:
        dim_room: height and width in cells, outer walls included, each at least 3.
        num_boxes: number of boxes, and of targets.
        search_depth: steps of the backward game (`random_room`) that finds the start; fewer steps make easier
            rooms.
        render_mode: what is observed, `text` or a picture (`rgb_array`). `render()` draws in both modes.
        observation: the form of the text: a `grid` of symbols, `coordinates` (`#1,1 O3,4 X2,3 P2,2`), or
            `both`.
        format_penalty: reward of an invalid action, on top of the step's.
        split: `train` or `val`: draws only rooms whose *content* belongs to this split. None: draws from all
            rooms.
        room_rows: one fixed room in the letters of Sokoban collections (`# .*$@+`), in place of `dim_room`,
            `num_boxes`, `search_depth` and `split`.
        grid_lookup: number → symbol, for each of 0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player,
            6 player on target.
        grid_vocab: symbol → meaning, for the rules.
        action_lookup: number → word, for each of 1 up, 2 down, 3 left, 4 right.
        env_instruction: replaces the rules that open the first prompt; "" leaves them out.

    >>> room = SokobanEnv(room_rows=["######", "#@$ .#", "######"])
    >>> print(room.reset(seed=0)[0])
    # # # # # #
    # P X _ O #
    # # # # # #
    >>> room.step("right")[1], room.step("Right")[1:3]
    (-0.1, (10.9, True))
    """

    name = "Sokoban"
    scene = "room"
    words = MappingProxyType({1: "Up", 2: "Down", 3: "Left", 4: "Right"})

    def __init__(
        self,
        dim_room: Sequence[int] = (6, 6),
        num_boxes: int = 1,
        search_depth: int = 300,
        render_mode: RenderMode = "text",
        observation: ObservationKind = "grid",
        format_penalty: float = 0.0,
        split: Split | None = None,
        room_rows: Sequence[str] | None = None,
        grid_lookup: Mapping[Any, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        action_lookup: Mapping[Any, str] | None = None,
        env_instruction: str | None = None,
    ) -> None:
        super().__init__(render_mode, observation, format_penalty, split, action_lookup)
        if grid_lookup is None:
            grid_lookup = GRID_LOOKUP
        numbers = tuple(GRID_LOOKUP)
        self._symbols = words_by_number(
            "grid_lookup",
            grid_lookup,
            numbers,
            is_case_sensitive=True,
        )
        self._meanings = self._checked_meanings(grid_vocab)
        check_room_arguments(dim_room, num_boxes, search_depth)
        height, width = dim_room
        self._dim_room = (height, width)
        self._num_boxes = num_boxes
        self._search_depth = search_depth
        self._fixed_room = None if room_rows is None else read_room(room_rows)
        if env_instruction is None:
            env_instruction = self._default_rules()
        self._instruction = env_instruction
        self._layout: Layout | None = None
        self._room_id = ""
        self._scenery = ""
        self._plan: dict[State, int] = {}
        self.state = State(0, frozenset())
        """Player and boxes of the current episode."""

    @property
    def layout(self) -> Layout:
        """Walls and targets of the current episode."""
        if self._layout is None:
            raise EnvironmentFault("SokobanEnv was used before reset; call reset(seed=…) first")
        return self._layout

    @property
    def is_solved(self) -> bool:
        return self.state.boxes == self.layout.targets

    @property
    def is_solvable(self) -> bool:
        """Whether the boxes can still be pushed onto the targets; False also if `shortest_solution` gives up
        its search."""
        return shortest_solution(self.layout, self.state) is not None

    def reset(self, *, seed: int | None = None) -> tuple[str | Observation, dict[str, Any]]:
        """Draws the room of `seed`. Without a seed, one is derived from the last episode's seed."""
        self._seed = episode_seed(seed, self._seed)
        self._layout, self.state = self._fixed_room or random_room(
            self._seed,
            self._dim_room,
            self._num_boxes,
            self._search_depth,
            self._split,
        )
        self._room_id = f"{layout_hash(self._layout):016x}"
        walls = self._places(WALL, inner_walls(self._layout))
        targets = self._places(TARGET, self._layout.targets)
        self._scenery = f"{walls} {targets}".strip()
        self._plan = {}
        return self._observe(), {"env_instruction": self._instruction}

    def step(self, action: str) -> Step:
        layout = self.layout
        start = self.state
        was_solved = self.is_solved
        number = self._numbers.get(action.strip().lower())
        if number is not None and not was_solved:
            self.state = move(layout, start, number)
        is_solved = self.is_solved
        num_gained = len(self.state.boxes & layout.targets) - len(start.boxes & layout.targets)
        reward = STEP_REWARD + TARGET_REWARD * num_gained + SOLVED_REWARD * (is_solved and not was_solved)
        return self._step(
            number,
            reward,
            is_success=is_solved,
            is_effective=self.state != start,
            is_over=is_solved,
        )

    def state_key(self) -> str:
        """Walls, targets, player and boxes: the full state."""
        boxes = ",".join(map(str, sorted(self.state.boxes)))
        return f"{self._room_id}:{self.state.player}:{boxes}"

    def expert_action(self) -> str:
        """The first action of a shortest solution; `actions[0]` if no solution is found, as with a stuck
        box."""
        if self.state not in self._plan:
            state = self.state
            for number in shortest_solution(self.layout, state) or [0]:
                self._plan[state] = number
                state = move(self.layout, state, number)
        return self.actions[self._plan[self.state]]

    def render(self) -> NDArray[np.uint8]:
        return draw_room(cell_numbers(self.layout, self.state), self.layout.width)

    def _cells(self) -> tuple[list[str], int]:
        numbers = cell_numbers(self.layout, self.state)
        return [self._symbols[number] for number in numbers], self.layout.width

    def _coordinates(self) -> str:
        """Inner walls, targets, boxes and player as `symbol row,column`, even if two of them share a cell.
        Walls, whose number varies, come first, so that all others keep their distance from the end of the
        prompt."""
        boxes = self._places(BOX, self.state.boxes)
        player = self._places(PLAYER, [self.state.player])
        return f"{self._scenery} {boxes} {player}"

    def _places(self, number: int, cells: Iterable[int]) -> str:
        width = self.layout.width
        symbol = self._symbols[number]
        return " ".join(f"{symbol}{cell // width},{cell % width}" for cell in sorted(cells))

    def _default_rules(self) -> str:
        return self._rules(
            "You push boxes in a room. Bring every box onto a target; boxes can't be pulled.",
            zip(self._symbols, self._meanings, strict=True),
            ". The walls around the room aren't named; the rest is floor.",
            ", and pushes the box that stands there if the cell behind it is free.",
        )

    def _checked_meanings(self, vocab: Mapping[str, str] | None) -> tuple[str, ...]:
        if vocab is None:
            return MEANINGS
        if not isinstance(vocab, Mapping) or set(vocab) != set(self._symbols):
            raise EnvironmentFault(
                f"grid_vocab {vocab!r} must say what each symbol of grid_lookup means: "
                f"{' '.join(self._symbols)}"
            )
        return tuple(vocab[symbol] for symbol in self._symbols)
