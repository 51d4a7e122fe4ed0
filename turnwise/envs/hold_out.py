"""Keeps training and validation tasks apart by their content, for environments that only take seeds."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Set
from functools import lru_cache
from typing import Any

import numpy as np

from turnwise.envs.base import TextEnv
from turnwise.types import Split, derive_seed

logger = logging.getLogger(__name__)

MAX_DRAWS = 64
"""Number of seeds that are tried before giving up. A quarter of many tasks are for validation, so 64 tries fail once in 10⁸."""


class HeldOutEnv(TextEnv):
    """An environment that only takes seeds. With a `split` it plays only that split's starts, or all if it finds none."""

    plays_all = False
    """Whether the last episode may be of the other split, because no start of the right split was found."""
    _seed = 0

    def _start(self, name: str, seed: int | None, split: Split | None, begin: Callable[[int], str]) -> None:
        """Calls `begin`, which starts the episode of a seed and returns its content, until the content belongs to the split:
        first with `seed` (by default the next one), then with seeds derived from it."""
        self._seed = derive_seed(self._seed, "next") if seed is None else seed
        for draw in range(MAX_DRAWS):
            if in_split(begin(derive_seed(self._seed, draw) if draw else self._seed), split):
                self.plays_all = False
                return
        _say_that_all_are_played(name)
        begin(self._seed)
        self.plays_all = True


def fingerprint(value: Any) -> str:
    """A hash of nested values, the same in every process: numbers, texts, arrays, mappings, sequences, sets, objects of these.

    A numpy number counts as its value. An object without a `repr` of its own counts as its class and attributes.

    >>> fingerprint({"a": (1, np.float32(2))}) == fingerprint({"a": [np.int64(1), 2.0]})
    True
    """
    return hashlib.blake2b(_canonical(value).encode(), digest_size=16).hexdigest()


def in_split(content: str, split: Split | None) -> bool:
    """Whether the task with this content belongs to `split`: a quarter of all contents are for validation."""
    return split is None or (int(fingerprint(content), 16) % 4 == 0) == (split == "val")


@lru_cache
def _say_that_all_are_played(env_name: str) -> None:
    """Warns that training and validation play the same tasks, once per environment name and process."""
    logger.warning("%s has too few tasks to hold any out: training and validation play the same tasks", env_name)


def _canonical(value: Any) -> str:
    match value:
        case np.ndarray() | np.generic():
            return _canonical(value.tolist())
        case Mapping():
            return "{" + ",".join(sorted(f"{_canonical(key)}:{_canonical(item)}" for key, item in value.items())) + "}"
        case Set():
            return "<" + ",".join(sorted(map(_canonical, value))) + ">"
        case list() | tuple():
            return "[" + ",".join(map(_canonical, value)) + "]"
        case type() | str() | bytes():
            return repr(value)
        case _:
            text = repr(value)
            # The default `repr` of an object is its address. Pickle would keep its class, and its attributes or slots.
            return _canonical(value.__reduce_ex__(2)[1:3]) if " at 0x" in text else text
