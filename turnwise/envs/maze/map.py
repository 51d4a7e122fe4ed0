"""Maps of mazes: drawing and checking them, and finding paths. A map is a tuple of rows of the letters S
(start), F (floor), W (wall) and G (goal). A position is row · width + column. An action is 0 left, 1 down, 2
right, 3 up."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from turnwise.envs.arguments import check_rows
from turnwise.envs.grid import fewest_actions, neighbours
from turnwise.envs.hold_out import content_hash, in_split
from turnwise.errors import EnvironmentFault
from turnwise.types import Split

Map = tuple[str, ...]

MAX_DRAWS = 20_000
"""Maximum maps drawn for one seed: with many walls, hardly any map has a way to the goal."""


def next_position(rows: Sequence[str], position: int, action: int) -> int:
    """Where an action leads; a wall, or the edge, keeps the player in place.

    >>> next_position(("SF", "WG"), 0, 1), next_position(("SF", "WG"), 0, 2)
    (0, 1)
    """
    width = len(rows[0])
    there = neighbours(len(rows), width)[position][action]
    if rows[there // width][there % width] == "W":
        return position
    return there


def shortest_path(rows: Sequence[str], start: int | None = None) -> list[int] | None:
    """The shortest list of actions from `start` (default: S) to the goal; None if there is no way."""
    letters = "".join(rows)
    if start is None:
        start = letters.index("S")
    return fewest_actions(
        start,
        lambda cell: letters[cell] == "G",
        lambda cell: [next_position(rows, cell, action) for action in range(4)],
    )


def map_hash(rows: Sequence[str]) -> int:
    """The `content_hash` of a map."""
    return content_hash("\n".join(rows))


@lru_cache(maxsize=1024)  # all siblings of a group draw the same map
def random_map(seed: int, size: int, wall_share: float, split: Split | None) -> Map:
    """The seed's first map of `size` × `size` cells that belongs to the split and has a way from S, at the
    top left, to G, at the bottom right. Other cells are walls with probability `wall_share`. Raises
    EnvironmentFault if `MAX_DRAWS` draws yield none."""
    rng = np.random.default_rng(seed)
    for _ in range(MAX_DRAWS):
        is_wall = rng.random((size, size)) < wall_share
        rows = ["".join("W" if wall else "F" for wall in row) for row in is_wall.tolist()]
        rows[0] = "S" + rows[0][1:]
        rows[-1] = rows[-1][:-1] + "G"
        if in_split(map_hash(rows), split) and shortest_path(rows) is not None:
            return tuple(rows)
    raise EnvironmentFault(
        f"maze: no {size}×{size} map with wall_share {wall_share} and a way to the goal for split {split!r} "
        f"in {MAX_DRAWS} draws; lower wall_share or, if so few maps can't be split, set split: null in "
        "env_config"
    )


def read_map(rows: Sequence[str]) -> Map:
    """A map of a config as a tuple. Raises EnvironmentFault if it isn't a valid map."""
    check_rows("map_rows", rows, "SFWG")
    letters = "".join(rows)
    if letters.count("S") != 1 or letters.count("G") != 1 or shortest_path(rows) is None:
        raise EnvironmentFault(f"map_rows {list(rows)!r} must have one S and one G, and a way between them")
    return tuple(rows)
