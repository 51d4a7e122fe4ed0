"""Argument checks for constructors of environments. Each raises EnvironmentFault, which names the value and
what is allowed."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from turnwise.errors import EnvironmentFault


def check_choice(
    env_name: str,
    name: str,
    value: object,
    allowed: Sequence[object],
) -> None:
    if value not in allowed:
        raise EnvironmentFault(
            f"{env_name}: got {name} {value!r}; allowed are {', '.join(map(repr, allowed))}"
        )


def check_type(
    env_name: str,
    name: str,
    value: object,
    allowed: type,
    meaning: str,
) -> None:
    """Refuses a value that isn't of the type `allowed`, which `meaning` names in words. A bool isn't a
    number.

    >>> check_type("gymnasium", "id", 5, str, "a string")
    Traceback (most recent call last):
    ...
    turnwise.errors.EnvironmentFault: gymnasium: got id 5; it must be a string
    """
    if not isinstance(value, allowed) or (isinstance(value, bool) and allowed is not bool):
        raise EnvironmentFault(f"{env_name}: got {name} {value!r}; it must be {meaning}")


def check_count(env_name: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EnvironmentFault(f"{env_name}: got {name} {value!r}; it must be at least 1, a whole number")


def check_format_penalty(value: float) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
        raise EnvironmentFault(f"format_penalty {value!r} isn't a reward; it must be a number, 0 or less")
    if value > 0:
        raise EnvironmentFault(f"format_penalty {value} would reward invalid actions; it must be 0 or less")


def is_list_of_str(value: object) -> TypeGuard[Sequence[str]]:
    """Whether a value is a sequence of strings, and isn't a string itself."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(item, str) for item in value)


def check_rows(name: str, rows: object, letters: str) -> None:
    """Refuses rows of a grid that aren't strings of equal length, made of `letters`."""
    if not is_list_of_str(rows):
        raise EnvironmentFault(f"{name} {rows!r} must be a list of strings, one per row")
    row_lengths = {len(row) for row in rows}
    unknown_letters = set("".join(rows)) - set(letters)
    if not any(rows) or len(row_lengths) != 1 or unknown_letters:
        raise EnvironmentFault(
            f"{name} {list(rows)!r} must be rows of equal length, made of the letters {letters!r}"
        )


def words_by_number(
    name: str,
    lookup: Mapping[Any, str],
    numbers: Sequence[int],
    *,
    is_case_sensitive: bool = False,
) -> tuple[str, ...]:
    """The stripped words of `lookup`, in the order of `numbers`. Keys of `lookup` are numbers, or numbers as
    text. Each number must have its own word; words that differ in case alone count as the same unless
    `is_case_sensitive`.

    >>> words_by_number("action_lookup", {"2": "Down ", 1: "Up"}, (1, 2))
    ('Up', 'Down')
    """
    keys = [str(number) for number in numbers]
    if not isinstance(lookup, Mapping):
        raise EnvironmentFault(f"{name} {lookup!r} must map each of {', '.join(keys)} to a word")
    words = {str(number): str(word).strip() for number, word in lookup.items()}
    distinct = set(words.values())
    if not is_case_sensitive:
        distinct = {word.lower() for word in distinct}
    if set(words) != set(keys) or len(distinct - {""}) != len(keys):
        raise EnvironmentFault(f"{name} {dict(lookup)!r} must give each of {', '.join(keys)} its own word")
    return tuple(words[key] for key in keys)
