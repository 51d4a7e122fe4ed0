"""Splits by content: the same in every process; an environment with too few tasks plays all of them, and says
so."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.envs.frozen_lake.map import map_hash
from turnwise.envs.hold_out import MAX_DRAWS, HeldOutEnv, content_hash, fingerprint, in_split

VALUE = {"words": {"b", "a", "c"}, "grid": ((1, 2), ("x", None)), "left": 0.5}


def test_a_fingerprint_is_of_what_is_in_a_value() -> None:
    nested = {"grid": np.array([[1, 2], [3, 4]]), "names": {"b", "a"}, "at": (np.int64(3), 0.5)}
    same = {"names": {"a", "b"}, "at": [3, 0.5], "grid": [[1, 2], [3, 4]]}
    assert fingerprint(nested) == fingerprint(same)
    for other in (
        {**same, "at": [3, 0.25]},
        {**same, "grid": [[1, 2, 3, 4]]},
        {**same, "names": {"a"}},
        {**same, "x": None},
    ):
        assert fingerprint(other) != fingerprint(same)
    assert fingerprint("1") != fingerprint(1)


class Plain:
    """An object whose `repr` shows its address."""

    __slots__ = ("column", "row")

    def __init__(self, row: int, column: int) -> None:
        self.row, self.column = row, column


class Open(Plain):
    """An object with a `__dict__` besides its slots."""


@pytest.mark.parametrize("kind", [Plain, Open])
def test_an_object_is_its_attributes_and_not_its_address(kind: type[Plain]) -> None:
    def key(row: int, column: int) -> str:
        return fingerprint({"cars": [kind(row, column), kind(0, 0)]})

    assert key(1, 2) == key(1, 2) and key(1, 2) != key(2, 1)
    assert fingerprint(Plain(1, 2)) != fingerprint(Open(1, 2))


def test_hashes_are_the_same_in_every_process() -> None:
    assert fingerprint(VALUE) == "8c5620372d5ab2fcfe71e5c8abeb6252"
    assert map_hash(["SF", "HG"]) == 1852500304429972428


def test_a_quarter_validates_and_nothing_is_in_both() -> None:
    contents = [content_hash(f"task {number}") for number in range(2000)]
    held_out = [content for content in contents if in_split(content, "val")]
    assert 400 < len(held_out) < 600
    assert all(
        in_split(content, "train") != in_split(content, "val") and in_split(content, None)
        for content in contents
    )


class Small(HeldOutEnv):
    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, object]]:
        self.seeds: list[int] = []
        self._start(
            "A small Env",
            seed,
            "val" if in_split(int(fingerprint("one"), 16), "train") else "train",
            self.begin,
        )

    def begin(self, seed: int) -> str:
        self.seeds.append(seed)
        return "one"

    def step(self, action: str) -> tuple[str, dict[str, object]]: ...


def test_the_first_candidate_is_the_seed_and_so_is_the_last_with_a_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = Small()
    for _ in range(2):
        env.reset(seed=7)
        assert env.plays_all and env.seeds[0] == env.seeds[-1] == 7
        assert len(env.seeds) == MAX_DRAWS + 1 and len(set(env.seeds)) == MAX_DRAWS
    assert caplog.messages == [
        "A small Env has too few tasks to hold any out: training and validation play the same tasks"
    ]
