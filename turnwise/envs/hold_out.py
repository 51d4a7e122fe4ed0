"""Keeps training and validation tasks apart by their content, for environments that only take seeds."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Set
from functools import lru_cache
from typing import Any

import numpy as np

from turnwise.envs.base import TextEnv, episode_seed
from turnwise.types import Split, derive_seed

logger = logging.getLogger(__name__)

MAX_DRAWS = 64
"""Maximum seeds tried for one start. A quarter of all starts are for validation: 64 seeds all miss them once
in 10⁸ times."""


class HeldOutEnv(TextEnv):
    """An environment whose tasks can only be chosen by a seed. It plays only starts of its `split`, unless it
    finds none."""

    plays_all = False
    """Whether the current episode may belong to the other split, because no start of the right split was
    found."""
    _seed = 0

    def _start(
        self,
        name: str,
        seed: int | None,
        split: Split | None,
        begin: Callable[[int], str],
    ) -> None:
        """Calls `begin(seed)`, which starts an episode and returns its content, with new seeds until the
        content is in `split`. The first seed is `seed`; None derives it from the last episode's. If none of
        `MAX_DRAWS` fits, the first is played."""
        self._seed = episode_seed(seed, self._seed)
        for draw in range(MAX_DRAWS):
            draw_seed = derive_seed(self._seed, draw) if draw else self._seed
            content = begin(draw_seed)
            if in_split(int(fingerprint(content), 16), split):
                self.plays_all = False
                return
        _say_that_all_are_played(name)
        begin(self._seed)
        self.plays_all = True


def fingerprint(value: Any) -> str:
    """A hash of numbers, texts, arrays, mappings, sequences, sets, and objects made of these; the same in
    every process.

    A numpy number counts as its value. An object whose class has no `__repr__` counts as its class and
    attributes.

    >>> fingerprint({"a": (1, np.float32(2))}) == fingerprint({"a": [np.int64(1), 2.0]})
    True
    """
    return hashlib.blake2b(_canonical(value).encode(), digest_size=16).hexdigest()


def content_hash(text: str) -> int:
    """A hash of the text, in [0, 2⁶⁴) and the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def in_split(content: int, split: Split | None) -> bool:
    """Whether the hash `content` of a task is in `split`. `val` has a quarter of hashes, `train` has the
    others, None all."""
    return split is None or (content % 4 == 0) == (split == "val")


@lru_cache
def _say_that_all_are_played(env_name: str) -> None:
    """Warns that both splits play the same tasks, once per environment name and process."""
    logger.warning(
        "%s has too few tasks to hold any out: training and validation play the same tasks", env_name
    )


def _canonical(value: Any) -> str:
    match value:
        case np.ndarray() | np.generic():
            return _canonical(value.tolist())
        case Mapping():
            items = sorted(f"{_canonical(key)}:{_canonical(item)}" for key, item in value.items())
            return "{" + ",".join(items) + "}"
        case Set():
            return "<" + ",".join(sorted(map(_canonical, value))) + ">"
        case list() | tuple():
            return "[" + ",".join(map(_canonical, value)) + "]"
        case type() | str() | bytes():
            return repr(value)
        case _:
            text = repr(value)
            if " at 0x" not in text:
                return text
            # The default `repr` holds the object's address; pickle's reduction holds its class, and its
            # attributes or slots.
            return _canonical(value.__reduce_ex__(2)[1:3])
