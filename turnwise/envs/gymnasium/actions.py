"""The words of a gymnasium environment's actions."""

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import EnvironmentFault, nearest


def action_words(
    env_id: str,
    names: Sequence[str] | Mapping[Any, str] | None,
    numbers: range,
    usual_words: Sequence[str],
) -> dict[int, str]:
    """Number → word of the actions that may be taken. `names` is the argument `action_names` of
    `GymnasiumEnv`, `usual_words` are those that turnwise knows. Raises EnvironmentFault if `names` don't fit
    the environment.

    >>> taxi = ("south", "north", "east", "west", "pickup", "dropoff")
    >>> action_words("Taxi-v4", ["north", "Pickup"], range(6), taxi)
    {1: 'north', 4: 'Pickup'}
    """
    if isinstance(names, str) or not isinstance(names, Sequence | Mapping | None):
        raise EnvironmentFault(
            f"action_names {names!r} must be a list of words, or a mapping {{number: word}}"
        )
    # A subclass of a known class may have only the first of its actions, or more. With more, no names are
    # known.
    usual_words = usual_words[: len(numbers)]
    if len(usual_words) < len(numbers):
        usual_words = ()
    by_name = {word.lower(): number for word, number in zip(usual_words, numbers, strict=False)}
    if names is None:
        words = dict(zip(numbers, usual_words or map(str, numbers), strict=True))
    elif isinstance(names, Mapping):
        words = {_number(env_id, number, numbers): str(word) for number, word in names.items()}
    elif any(str(name).strip().lower() in by_name for name in names):
        words = {_number_of(env_id, str(name), by_name): str(name) for name in names}
    elif len(names) == len(numbers):
        words = dict(zip(numbers, map(str, names), strict=True))
    else:
        actions = _shown(numbers)
        if usual_words:
            actions += f": {', '.join(usual_words)}"
        raise EnvironmentFault(
            f"action_names {list(names)!r}: gymnasium's {env_id} has {len(numbers)} actions, {actions}; give "
            "a word for each in their order, or {number: word} for some"
        )
    words = {number: word.strip() for number, word in words.items()}
    distinct = {word.lower() for word in words.values()} - {""}
    is_ambiguous = names is not None and len(names) != len(words)
    if not words or len(distinct) != len(words) or is_ambiguous:
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


def _number_of(env_id: str, name: str, by_name: Mapping[str, int]) -> int:
    word = name.strip().lower()
    if word not in by_name:
        raise EnvironmentFault(
            f"action_names: {name!r} isn't an action of gymnasium's {env_id}; its actions are "
            f"{', '.join(by_name)}; rename one with {{number: word}}.{nearest(word, by_name)}"
        )
    return by_name[word]


def _shown(numbers: range) -> str:
    return f"{numbers.start} to {numbers.stop - 1}"
