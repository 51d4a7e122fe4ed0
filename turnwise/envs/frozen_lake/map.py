"""Maps of the frozen lake: drawing, hashing and checking them, and finding paths. A map is a tuple of rows of
the letters S (start), F (ice), H (hole) and G (goal). A position is row · width + column. An action is
gymnasium's number: 0 left, 1 down, 2 right, 3 up."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, combinations
from numbers import Real

import numpy as np

from turnwise.envs.arguments import check_count, check_rows, check_type
from turnwise.envs.grid import fewest_actions, neighbours
from turnwise.envs.hold_out import content_hash, in_split
from turnwise.errors import EnvironmentFault
from turnwise.types import Split

Map = tuple[str, ...]

LEFT, DOWN, RIGHT, UP = range(4)
MAX_DRAWS = 20_000
"""Maximum maps drawn for one seed: some combinations of `size`, `p` and `split` (almost) never yield a
solvable map."""


def shortest_path(rows: Sequence[str], start: int | None = None) -> list[int] | None:
    """The shortest list of actions from `start` (default: S) to the goal if the ice isn't slippery; None if
    there is no way.

    >>> shortest_path(("SH", "FG"))
    [1, 2]
    """
    letters = "".join(rows)
    cells = neighbours(len(rows), len(rows[0]))
    if start is None:
        start = letters.index("S")

    def moves(cell: int) -> Sequence[int]:
        return () if letters[cell] == "H" else cells[cell]

    return fewest_actions(start, lambda cell: letters[cell] == "G", moves)


def map_hash(rows: Sequence[str]) -> int:
    """The `content_hash` of a map."""
    return content_hash("\n".join(rows))


@lru_cache(maxsize=1024)  # all siblings of a group draw the same map
def random_map(
    seed: int,
    size: int = 4,
    p: float = 0.8,
    split: Split | None = None,
) -> Map:
    """A solvable map with S at the top left and G at the bottom right; other cells are ice with probability
    `p`. It depends on the arguments alone. Without `split` it is gymnasium's `generate_random_map(size, p,
    seed)`; with `split`, it is the first solvable map of the same draws that belongs to the split. Raises
    EnvironmentFault if `MAX_DRAWS` draws yield none."""
    check_map_arguments(size, p)
    rng = np.random.default_rng(seed)
    for _ in range(MAX_DRAWS):
        is_ice = rng.random((size, size)) < p
        rows = ["".join("F" if ice else "H" for ice in row) for row in is_ice.tolist()]
        rows[0] = "S" + rows[0][1:]
        rows[-1] = rows[-1][:-1] + "G"
        if in_split(map_hash(rows), split) and shortest_path(rows) is not None:
            return tuple(rows)
    raise EnvironmentFault(
        f"no solvable {size}×{size} map with p {p} for split {split!r} in {MAX_DRAWS} draws; raise p, or for "
        "a tiny or hole-free lake, which has too few maps to split, set split: null or map_rows in env_config"
    )


def check_map_arguments(size: int, p: float) -> None:
    check_count("FrozenLake", "size", size)
    check_type("FrozenLake", "p", p, Real, "a number")
    if size < 2 or not 0.0 < p <= 1.0:
        raise EnvironmentFault(
            f"got size {size} and p {p} for a frozen lake; size must be at least 2 and p in (0, 1]"
        )


def read_map(rows: Sequence[str]) -> Map:
    """A given map as a tuple. Raises EnvironmentFault if it isn't a valid map."""
    check_rows("map_rows", rows, "SFHG")
    letters = "".join(rows)
    if letters.count("S") != 1 or letters.count("G") != 1 or shortest_path(rows) is None:
        raise EnvironmentFault(f"map_rows {list(rows)!r} must have one S and one G, and a way between them")
    return tuple(rows)


def best_blind_path(maps: Sequence[Sequence[str]]) -> tuple[list[int], float]:
    """The sequence of right and down that solves the most maps if the ice isn't slippery, and the share of
    maps that it solves.

    A player reaches this share without looking at the maps, so a learnt policy must beat it. For n×n maps,
    C(2n−2, n−1) sequences are tried, so n should be at most 8. Raises ValueError unless all maps have one
    size, S first and G last.

    >>> best_blind_path([("SF", "HG"), ("SF", "HG"), ("SH", "FG")])
    ([2, 1], 0.6666666666666666)
    """
    height = len(maps[0])
    width = len(maps[0][0])
    letters = ["".join(rows) for rows in maps]
    if any(len(cells) != height * width or cells[0] != "S" or cells[-1] != "G" for cells in letters):
        raise ValueError(
            "best_blind_path needs maps of one size with S at the top left and G at the bottom right"
        )
    is_hole = np.array([[letter == "H" for letter in cells] for cells in letters])
    moves = neighbours(height, width)
    num_steps = height + width - 2

    def path_of(downs: Sequence[int]) -> list[int]:
        path = [RIGHT] * num_steps
        for index in downs:
            path[index] = DOWN
        return path

    def share(path: list[int]) -> float:
        cells = list(accumulate(path, lambda cell, action: moves[cell][action], initial=0))
        return float(np.mean(~is_hole[:, cells].any(axis=1)))

    paths = map(path_of, combinations(range(num_steps), height - 1))
    best = max(paths, key=share)
    return best, share(best)
