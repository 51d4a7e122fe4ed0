"""Checks that constructors of environments share. Each says what was got and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import EnvironmentFault


def check_choice(env_name: str, name: str, value: object, allowed: Sequence[object]) -> None:
    """
    Raises:
        EnvironmentFault: the value isn't one of those allowed.
    """
    if value not in allowed:
        raise EnvironmentFault(f"{env_name}: got {name} {value!r}; allowed are {', '.join(map(repr, allowed))}")


def check_format_penalty(value: float) -> None:
    """
    Raises:
        EnvironmentFault: it is positive.
    """
    if value > 0:
        raise EnvironmentFault(f"format_penalty {value} would reward invalid actions; it must be 0 or less")


def words_by_number(
    name: str, lookup: Mapping[Any, str], numbers: Sequence[int], *, is_case_sensitive: bool = False
) -> tuple[str, ...]:
    """The stripped word of each number, in the order of `numbers`; a config may write a number as text.

    Raises:
        EnvironmentFault: a number is missing or unknown, or two words are equal.

    >>> words_by_number("action_lookup", {"2": "Down ", 1: "Up"}, (1, 2))
    ('Up', 'Down')
    """
    words = {str(number): str(word).strip() for number, word in lookup.items()}
    told_apart = {word if is_case_sensitive else word.lower() for word in words.values()} - {""}
    if set(words) != {str(number) for number in numbers} or len(told_apart) != len(numbers):
        raise EnvironmentFault(f"{name} {dict(lookup)!r} must give each of {', '.join(map(str, numbers))} a word of its own")
    return tuple(words[str(number)] for number in numbers)
