"""The words of a gymnasium environment's actions."""

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import EnvironmentFault, nearest


def action_words(
    env_id: str,
    names: Sequence[str] | Mapping[Any, str] | None,
    numbers: range,
    known: Sequence[str],
) -> dict[int, str]:
    """Number → word of the actions that may be taken. `names` is the argument `action_names` of
    `GymnasiumEnv`, `known` are the words that turnwise knows. Raises EnvironmentFault if `names` don't fit
    the environment.

    >>> action_words("Taxi-v4", ["north", "Pickup"], range(6), ("south", "north", "east", "west", "pickup",
    "dropoff")) {1: 'north', 4: 'Pickup'}
    """
    if isinstance(names, str) or not isinstance(names, Sequence | Mapping | None):
        raise EnvironmentFault(
            f"action_names {names!r} must be a list of words, or a mapping {{number: word}}"
        )
    # A subclass of a known class may have only the first of its actions, or more. With more, no names are
    # known.
    known = known[: len(numbers)] if len(known) >= len(numbers) else ()
    by_name = {name.lower(): number for name, number in zip(known, numbers, strict=False)}
    if names is None:
        words = dict(zip(numbers, known or map(str, numbers), strict=True))
    elif isinstance(names, Mapping):
        words = {_number(env_id, number, numbers): str(word) for number, word in names.items()}
    elif any(str(name).strip().lower() in by_name for name in names):
        words = {_known_number(env_id, str(name), by_name): str(name) for name in names}
    elif len(names) == len(numbers):
        words = dict(zip(numbers, map(str, names), strict=True))
    else:
        raise EnvironmentFault(
            f"action_names {list(names)!r}: gymnasium's {env_id} has {len(numbers)} actions, "
            f"{_shown(numbers)}"
            f"{': ' if known else ''}{', '.join(known)}; give a word for each in their order, or {{number: "
            f"word}} for some"
        )
    words = {number: word.strip() for number, word in words.items()}
    if (
        not words
        or len({word.lower() for word in words.values()} - {""}) != len(words)
        or (names and len(names) != len(words))
    ):
        raise EnvironmentFault(f"action_names {names!r} must give each action its own word")
    return words


def _number(env_id: str, number: Any, numbers: range) -> int:
    text = str(number).strip()
    if not text.isdecimal() or int(text) not in numbers:
        raise EnvironmentFault(
            f"action_names: {number!r} isn't an action of gymnasium's {env_id}; its actions are "
            f"{_shown(numbers)}"
        )
    return int(text)


def _known_number(env_id: str, name: str, by_name: Mapping[str, int]) -> int:
    word = name.strip().lower()
    if word not in by_name:
        raise EnvironmentFault(
            f"action_names: {name!r} isn't an action of gymnasium's {env_id}; its actions are "
            f"{', '.join(by_name)}; "
            f"rename one with {{number: word}}.{nearest(word, by_name)}"
        )
    return by_name[word]


def _shown(numbers: range) -> str:
    return f"{numbers.start} to {numbers.stop - 1}"
