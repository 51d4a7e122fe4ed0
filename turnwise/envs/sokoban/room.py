"""Rooms of Sokoban: moving in them, hashing, reading and generating them. A cell is row · width + column. An
action is 0 up, 1 down, 2 left, 3 right. A room has walls all around, so no action leads out of it."""

import random
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from turnwise.envs.arguments import check_count, check_rows
from turnwise.envs.hold_out import content_hash, in_split
from turnwise.errors import EnvironmentFault
from turnwise.types import Split

LETTERS = "# .*$@+"
"""The letters of Sokoban collections: wall, floor, target, box on target, box, player, player on target."""
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)  # indices of LETTERS

FLOOR_SHARE = (0.5, 0.9)
"""The range from which each room draws the share of floor among its inner cells."""
MAX_DRAWS = 5_000
"""Maximum rooms drawn for one seed: some arguments (almost) never yield a room."""


class Layout(NamedTuple):
    """The fixed part of a room."""

    height: int
    width: int
    walls: frozenset[int]
    targets: frozenset[int]

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """What each action adds to the player's cell."""
        return (-self.width, self.width, -1, 1)


class State(NamedTuple):
    """The part of a room that actions can change."""

    player: int
    boxes: frozenset[int]


def move(layout: Layout, state: State, action: int) -> State:
    """The state after an action: the player walks, or pushes the box ahead, or stays if neither is possible.

    >>> layout, state = read_room(["######", "#@$ .#", "######"])
    >>> move(layout, state, 3)
    State(player=8, boxes=frozenset({9}))
    """
    step = layout.steps[action]
    ahead = state.player + step
    if ahead in layout.walls:
        return state
    if ahead not in state.boxes:
        return State(ahead, state.boxes)
    beyond = ahead + step
    if beyond in layout.walls or beyond in state.boxes:
        return state
    return State(ahead, state.boxes - {ahead} | {beyond})


def cell_numbers(layout: Layout, state: State) -> list[int]:
    """The content of each cell, as its index in `LETTERS`."""
    cells = [FLOOR] * (layout.height * layout.width)
    for cell in layout.walls:
        cells[cell] = WALL
    for cell in layout.targets:
        cells[cell] = TARGET
    for cell in state.boxes:
        cells[cell] = BOX_ON_TARGET if cell in layout.targets else BOX
    cells[state.player] = PLAYER_ON_TARGET if state.player in layout.targets else PLAYER
    return cells


def inner_walls(layout: Layout) -> frozenset[int]:
    """The walls that aren't on the border of the room."""
    return layout.walls.intersection(_inner_cells(layout.height, layout.width))


def layout_hash(layout: Layout) -> int:
    """The `content_hash` of walls and targets. It decides the split, so no state of a held-out room occurs in
    training."""
    size = f"{layout.height},{layout.width}"
    return content_hash(f"{size}:{sorted(layout.walls)}:{sorted(layout.targets)}")


def random_room(
    seed: int,
    dim_room: tuple[int, int] = (6, 6),
    num_boxes: int = 1,
    search_depth: int = 300,
    split: Split | None = None,
) -> tuple[Layout, State]:
    """A solvable, unsolved room of `dim_room` (height, width; walls included). It depends on the arguments
    alone. A floor grows cell by cell and gets targets. Then a game is played backwards from the solved room:
    `search_depth` random steps, each of which pulls the box behind the player, if there is one. The room
    starts in the last new state of this game in which no box is on a target. Raises EnvironmentFault if no
    room is found."""
    check_room_arguments(dim_room, num_boxes, search_depth)
    height, width = dim_room
    rng = random.Random(seed)
    for _ in range(MAX_DRAWS):
        floor = _grown_floor(rng, height, width)
        if len(floor) < 2 * num_boxes + 1:
            continue
        targets = frozenset(_popped(rng, floor) for _ in range(num_boxes))
        walls = frozenset(range(height * width)) - targets - frozenset(floor)
        layout = Layout(height, width, walls, targets)
        if not in_split(layout_hash(layout), split):
            continue
        solved = State(_picked(rng, floor), targets)
        start = _played_backwards(rng, layout, solved, search_depth)
        if start is not None:
            return layout, start
    raise EnvironmentFault(
        f"no {height}×{width} room with {num_boxes} boxes for split {split!r} in {MAX_DRAWS} draws; in "
        "env_config raise dim_room or search_depth, lower num_boxes, or, for tiny rooms, which are too few "
        "to split, set split: null"
    )


def check_room_arguments(
    dim_room: Sequence[int],
    num_boxes: int,
    search_depth: int,
) -> None:
    sides: list[int] = []
    if isinstance(dim_room, Sequence):
        sides = [side for side in dim_room if isinstance(side, int) and not isinstance(side, bool)]
    if len(sides) != 2 or len(dim_room) != 2:
        raise EnvironmentFault(f"dim_room {dim_room!r} must be two whole numbers: [height, width]")
    check_count("Sokoban", "num_boxes", num_boxes)
    check_count("Sokoban", "search_depth", search_depth)
    if min(sides) < 3:
        raise EnvironmentFault(
            f"got dim_room {sides} for Sokoban; sides must be at least 3, the walls included"
        )


def read_room(rows: Sequence[str]) -> tuple[Layout, State]:
    """The layout and state of a room given in the `LETTERS`. Raises EnvironmentFault if it isn't a valid,
    unsolved room."""
    check_rows("room_rows", rows, LETTERS)
    letters = "".join(rows)
    sides = [row[0] + row[-1] for row in rows]
    border = "".join([rows[0], rows[-1], *sides])
    if set(border) != {"#"}:
        raise EnvironmentFault(f"room_rows {list(rows)!r} must have walls (#) all around")
    walls = _cells_of(letters, "#")
    targets = _cells_of(letters, ".*+")
    boxes = _cells_of(letters, "$*")
    players = _cells_of(letters, "@+")
    if len(players) != 1 or not boxes or len(boxes) != len(targets):
        raise EnvironmentFault(
            f"room_rows {list(rows)!r} has {len(players)} players, {len(boxes)} boxes and {len(targets)} "
            "targets; it must have one player, and as many boxes as targets, at least one"
        )
    if boxes == targets:
        raise EnvironmentFault(
            f"room_rows {list(rows)!r} is solved already; start with a box ($) off its target (.)"
        )
    [player] = players
    return Layout(len(rows), len(rows[0]), walls, targets), State(player, boxes)


def _cells_of(letters: str, kinds: str) -> frozenset[int]:
    return frozenset(cell for cell, letter in enumerate(letters) if letter in kinds)


def _inner_cells(height: int, width: int) -> list[int]:
    places = product(range(1, height - 1), range(1, width - 1))
    return [row * width + column for row, column in places]


def _grown_floor(rng: random.Random, height: int, width: int) -> list[int]:
    """Connected inner cells, in the order in which they were added."""
    inner = _inner_cells(height, width)
    low, high = FLOOR_SHARE
    size = round(len(inner) * (low + (high - low) * rng.random()))
    is_free = dict.fromkeys(inner, True)
    floor: list[int] = []
    edge = [_picked(rng, inner)]
    while len(floor) < size:
        cell = _popped(rng, edge)
        if is_free[cell]:
            is_free[cell] = False
            floor.append(cell)
            neighbours = (cell - width, cell + width, cell - 1, cell + 1)
            edge += filter(is_free.get, neighbours)
    return floor


def _played_backwards(
    rng: random.Random,
    layout: Layout,
    state: State,
    search_depth: int,
) -> State | None:
    """The last new state of the backward game in which no box is on a target; None if there is none. `move`
    can undo each backward step, so every state of the game can be solved."""
    visited: set[State] = set()
    last = None
    for _ in range(search_depth):
        step = layout.steps[int(4 * rng.random())]
        player = state.player - step
        behind = state.player + step
        boxes = state.boxes
        if player in layout.walls or player in boxes:
            continue
        if behind in boxes:
            boxes = boxes - {behind} | {state.player}
        state = State(player, boxes)
        if state not in visited and boxes.isdisjoint(layout.targets):
            visited.add(state)
            last = state
    return last


# Of the methods of `random.Random`, only `random()` promises the same numbers in every version of Python.


def _picked(rng: random.Random, cells: Sequence[int]) -> int:
    return cells[int(len(cells) * rng.random())]


def _popped(rng: random.Random, cells: list[int]) -> int:
    return cells.pop(int(len(cells) * rng.random()))
