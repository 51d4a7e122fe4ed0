"""What FrozenLake, Sokoban and mazes share: actions, observations, pictures made of tiles, and the search for
the fewest actions."""

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.arguments import check_choice, check_format_penalty, words_by_number
from turnwise.envs.base import Step, TextEnv
from turnwise.types import Media, Observation, Reduction, Split

ObservationKind = Literal["grid", "coordinates", "both"]
RenderMode = Literal["text", "rgb_array"]
Cell = TypeVar("Cell")
StateT = TypeVar("StateT", bound=Hashable)

TILE = 32
"""Side of a cell in pixels."""
FACE = (246, 214, 180)
y: NDArray[np.float64]
x: NDArray[np.float64]
y, x = np.mgrid[0:TILE, 0:TILE] / (TILE - 1) - 0.5


def disc(center_x: float, center_y: float, radius: float) -> NDArray[np.bool_]:
    """The pixels of a tile that lie in a disc around (`center_x`, `center_y`): bool [TILE, TILE]. A tile has
    side 1, middle (0, 0)."""
    return (x - center_x) ** 2 + (y - center_y) ** 2 <= radius**2


def box(min_x: float, min_y: float, max_x: float, max_y: float) -> NDArray[np.bool_]:
    """The pixels of a tile that lie in a rectangle: bool [TILE, TILE]. The coordinates are those of
    `disc`."""
    return (x >= min_x) & (x <= max_x) & (y >= min_y) & (y <= max_y)


EDGE = ~box(-0.47, -0.47, 0.47, 0.47)
PLAYER_COAT = disc(0, 0.36, 0.27) & (y <= 0.38)
PLAYER_FACE = disc(0, -0.06, 0.17)


def draw(
    cells: Sequence[Cell],
    width: int,
    paint: Callable[[NDArray[np.uint8], int, Cell], None],
) -> NDArray[np.uint8]:
    """A picture, uint8 [TILE · rows, TILE · width, 3]. `paint(tile, index, cell)` fills each tile [TILE,
    TILE, 3]."""
    picture = np.empty((TILE * len(cells) // width, TILE * width, 3), np.uint8)
    for index, cell in enumerate(cells):
        row, column = divmod(index, width)
        top = row * TILE
        start = column * TILE
        tile = picture[top : top + TILE, start : start + TILE]
        paint(tile, index, cell)
    return picture


def fewest_actions(
    start: StateT,
    is_goal: Callable[[StateT], bool],
    moves: Callable[[StateT], Iterable[StateT]],
    max_states: float = math.inf,
) -> list[int] | None:
    """The shortest list of action numbers from `start` to a goal, by breadth-first search; among equals, the
    lexicographically first. `moves(state)` yields the next state of each action. None if no goal is found
    within `max_states` states."""
    visited = {start}
    queue: deque[tuple[StateT, list[int]]] = deque([(start, [])])
    while queue and len(visited) <= max_states:
        here, actions = queue.popleft()
        if is_goal(here):
            return actions
        for action, there in enumerate(moves(here)):
            if there not in visited:
                visited.add(there)
                queue.append((there, [*actions, action]))
    return None


@lru_cache(maxsize=64)
def neighbours(height: int, width: int) -> tuple[tuple[int, int, int, int], ...]:
    """For each position (row · width + column), the positions that left, down, right and up lead to. An
    action over the edge stays in place.

    >>> neighbours(2, 2)[0]
    (0, 2, 1, 0)
    """
    cells = []
    for row, column in product(range(height), range(width)):
        left = row * width + max(column - 1, 0)
        down = min(row + 1, height - 1) * width + column
        right = row * width + min(column + 1, width - 1)
        up = max(row - 1, 0) * width + column
        cells.append((left, down, right, up))
    return tuple(cells)


class GridEnv(TextEnv):
    """Base of grid worlds. Actions are four words; case doesn't matter. Other text moves nothing and costs
    `format_penalty`."""

    name: ClassVar[str]
    scene: ClassVar[str]
    """Noun for the world, in the text beside a picture."""
    words: ClassVar[Mapping[int, str]]
    """The default `action_lookup`: number → word, in the order of `actions`."""
    metric_reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType(
        {
            "success": "last",
            "action_is_valid": "mean",
            "action_is_effective": "mean",
            "format_penalty": "mean",
        }
    )

    def __init__(
        self,
        render_mode: RenderMode,
        observation: ObservationKind,
        format_penalty: float,
        split: Split | None,
        action_lookup: Mapping[Any, str] | None,
    ) -> None:
        check_choice(self.name, "render_mode", render_mode, get_args(RenderMode))
        check_choice(self.name, "observation", observation, get_args(ObservationKind))
        check_choice(self.name, "split", split, (*get_args(Split), None))
        check_format_penalty(format_penalty)
        if action_lookup is None:
            action_lookup = self.words
        self.actions = words_by_number("action_lookup", action_lookup, tuple(self.words))
        self.shows_pictures = render_mode == "rgb_array"
        self._numbers = {word.lower(): number for number, word in enumerate(self.actions)}
        self._observation_kind = observation
        self._split = split
        self._format_penalty = float(format_penalty)
        self._seed = 0

    @abstractmethod
    def _cells(self) -> tuple[Sequence[str], int]:
        """The symbol of each cell, row after row, and the number of columns."""

    @abstractmethod
    def _coordinates(self) -> str: ...

    def _observe(self) -> str | Observation:
        if self.shows_pictures:
            picture = Media("image", self.render())
            return Observation(f"The picture shows the {self.scene}.", (picture,))
        if self._observation_kind == "coordinates":
            return self._coordinates()
        cells, width = self._cells()
        grid = "\n".join(" ".join(cells[start : start + width]) for start in range(0, len(cells), width))
        if self._observation_kind == "grid":
            return grid
        return f"{grid}\n{self._coordinates()}"

    def _step(
        self,
        number: int | None,
        reward: float,
        *,
        is_success: bool,
        is_effective: bool,
        is_over: bool,
    ) -> Step:
        """The result of `step`. `number` is the action's index in `actions`; None if the text was no
        action."""
        action: str | None = None
        penalty = self._format_penalty
        if number is not None:
            action = self.actions[number]
            penalty = 0.0
        metrics = {
            "success": float(is_success),
            "action_is_valid": float(number is not None),
            "action_is_effective": float(is_effective),
            "format_penalty": penalty,
        }
        info = {"metrics": metrics, "action": action}
        return self._observe(), reward + penalty, is_over, False, info

    def _rules(
        self,
        goal: str,
        symbols: Iterable[tuple[str, str]],
        unnamed: str,
        moves: str,
    ) -> str:
        """The rules that open the first prompt. `unnamed` follows the sentence on coordinates: it says what
        is in the cells that an observation doesn't list. `moves` follows the sentence on actions. Both texts
        include their punctuation."""
        lines = [goal]
        if not self.shows_pictures:
            legend = ", ".join(f"{symbol} {meaning}" for symbol, meaning in symbols)
            lines.append(f"Symbols: {legend}.")
            if self._observation_kind != "grid":
                lines.append(
                    f"A symbol with row,column stands at that place, counted from 0 at the top left{unnamed}"
                )
        lines.append(f"Actions: {', '.join(self.actions)}. Each moves you by one cell{moves}")
        return "\n".join(lines)
