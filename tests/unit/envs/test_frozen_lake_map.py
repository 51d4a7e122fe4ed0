"""Maps of FrozenLake: those of gymnasium's generator, solvable, and split by content."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from hypothesis import given, strategies as st
from messages import says

from turnwise.envs.frozen_lake.map import (
    best_blind_path,
    map_hash,
    neighbours,
    random_map,
    read_map,
    shortest_path,
)
from turnwise.envs.hold_out import in_split
from turnwise.errors import EnvironmentFault

SEEDS = st.integers(0, 2**63 - 1)
SIZES = st.integers(2, 8)
FLOATS = st.floats(0.55, 1.0)


@given(seed=SEEDS, size=SIZES, p=FLOATS)
def test_without_a_split_the_map_is_gymnasiums(seed: int, size: int, p: float) -> None:
    assert list(random_map(seed, size, p)) == generate_random_map(size, p, seed)


@given(seed=SEEDS, split=st.sampled_from(["train", "val"]))
def test_a_map_of_a_split_is_solvable_and_belongs_to_that_split_alone(seed: int, split: str) -> None:
    rows = random_map(seed, split=split)
    assert rows == random_map(seed, split=split)
    assert in_split(map_hash(rows), split)
    assert not in_split(map_hash(rows), "val" if split == "train" else "train")
    assert rows[0][0] == "S" and rows[-1][-1] == "G"
    assert shortest_path(rows) is not None


@given(seed=SEEDS, size=SIZES)
def test_the_shortest_path_leads_to_the_goal_over_ice_and_no_breadth_first_layer_is_shorter(
    seed: int, size: int
) -> None:
    rows = random_map(seed, size)
    letters, moves = "".join(rows), neighbours(size, size)
    path = shortest_path(rows)
    assert path is not None
    position = 0
    for action in path:
        assert letters[position] not in "HG"
        position = moves[position][action]
    assert letters[position] == "G"
    reached = {0}
    for _ in range(len(path) - 1):
        reached |= {n for cell in reached if letters[cell] != "H" for n in moves[cell]}
    assert size * size - 1 not in reached


def test_a_lake_without_enough_maps_for_a_split_says_what_to_change() -> None:
    splits = {split: in_split(map_hash(("SF", "FG")), split) for split in ("train", "val")}
    empty = next(split for split, has_it in splits.items() if not has_it)
    with pytest.raises(EnvironmentFault, match=r"2×2 .* p 1\.0 .*map_rows"):
        random_map(0, 2, 1.0, empty)


@pytest.mark.parametrize(("size", "p"), [(1, 0.8), (4, 0.0), (4, 1.2)])
def test_sizes_and_probabilities_out_of_range_are_refused(size: int, p: float) -> None:
    with pytest.raises(EnvironmentFault, match=says("size", "at least 2", "p")):
        random_map(0, size, p)


@pytest.mark.parametrize("rows", [[], ["SF", "G"], ["SX", "FG"], ["SS", "FG"], ["SF", "FF"], ["SH", "HG"]])
def test_given_maps_are_checked(rows: list[str]) -> None:
    with pytest.raises(EnvironmentFault, match="map_rows"):
        read_map(rows)


def test_the_best_blind_path_is_that_of_brute_force() -> None:
    maps = [random_map(seed, 3, 0.7) for seed in range(40)]

    def arrives(rows: tuple[str, ...], path: list[int]) -> bool:
        letters, position = "".join(rows), 0
        for action in path:
            position = neighbours(3, 3)[position][action]
            if letters[position] == "H":
                return False
        return letters[position] == "G"

    path, share = best_blind_path(maps)
    every = [[int(c) for c in np.base_repr(i, 4).zfill(4)] for i in range(4**4)]
    assert share == max(np.mean([arrives(rows, p) for rows in maps]) for p in every)
    assert share == np.mean([arrives(rows, path) for rows in maps])
