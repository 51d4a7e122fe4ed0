"""Gymnasium's spaces: which of them text can express, and how. Importing this module imports gymnasium."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from turnwise.errors import EnvironmentFault

MAX_ACTIONS = 256
MAX_NUMBERS = 256
"""Maximum numbers of an array observation; more are refused."""


def action_numbers(space: Any, env_name: str) -> range:
    """The numbers of a Discrete action space. Raises EnvironmentFault for any other space, or more than
    `MAX_ACTIONS`."""
    if not isinstance(space, spaces.Discrete):
        raise EnvironmentFault(
            f"{env_name}: its action space is {_shown(space)}; an agent of text chooses among words, so it "
            "must be Discrete: choose an environment with discrete actions, or wrap this one and register "
            "the wrapped one with gymnasium"
        )
    if space.n > MAX_ACTIONS:
        raise EnvironmentFault(
            f"{env_name}: its action space is {_shown(space)}; at most {MAX_ACTIONS} actions can be words"
        )
    return range(int(space.start), int(space.start + space.n))


def check_observations(space: Any, env_name: str) -> None:
    """Raises EnvironmentFault unless `as_text` can write the elements of an observation space."""
    match space:
        case spaces.Dict():
            for part in space.spaces.values():
                check_observations(part, env_name)
        case spaces.Tuple():
            for part in space.spaces:
                check_observations(part, env_name)
        case spaces.Discrete() | spaces.Text():
            pass
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary() if (
            np.prod(space.shape) <= MAX_NUMBERS
        ):
            pass
        case _:
            raise EnvironmentFault(
                f"{env_name}: its observation space has {_shown(space)}, which has no text of its own. "
                f"Those that have are Discrete, Text, arrays of at most {MAX_NUMBERS} numbers, and Dict and "
                "Tuple of them; for others set renderer to module:function, or render_mode: rgb_array"
            )


def is_number(space: Any) -> bool:
    """Whether each element of a space is one whole number."""
    return isinstance(space, spaces.Discrete)


def as_text(space: Any, value: Any) -> str:
    """An element of a space as text: floats with four significant digits, a line per row of an array, parts
    of a Dict by name.

    >>> space = spaces.Dict({"at": spaces.Box(0, 9, (2,)), "left": spaces.Discrete(3)})
    >>> as_text(space, {"at": np.array([1, 2.5]), "left": 2})
    'at: 1 2.5\\nleft: 2'
    """
    match space:
        case spaces.Dict():
            return "\n".join(f"{name}: {as_text(part, value[name])}" for name, part in space.spaces.items())
        case spaces.Tuple():
            return ", ".join(as_text(part, item) for part, item in zip(space.spaces, value, strict=True))
        case spaces.Text():
            return str(value)
        case _:
            return _numbers(np.asarray(value).tolist())


def _numbers(value: float | Sequence[Any]) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return str(int(value))
    is_row = all(isinstance(item, (int, float)) for item in value)
    separator = " " if is_row else "\n"
    return separator.join(map(_numbers, value))


def _shown(space: Any) -> str:
    text = " ".join(repr(space).split())
    if len(text) > 120:
        text = f"{text[:117]}..."
    return text
