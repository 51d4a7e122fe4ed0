"""What a reward returned, as numbers. Anything else than one number per completion is refused."""

import numbers
import reprlib
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, SupportsFloat

from turnwise.errors import EnvironmentFault
from turnwise.runtime.foreign import Foreign
from turnwise.types import MAX_ABS

_TEXTS = (str, bytes, bytearray, memoryview)


class RewardFault(EnvironmentFault):
    """A reward raised, hung, or returned something that isn't a reward."""


def read_scores(values: Any, num_wanted: int, name: str, may_be_none: bool = True) -> list[float | None]:
    """The scores that the reward `name` returned for `num_wanted` completions. None stays None if it
    `may_be_none`: the reward doesn't apply to that completion. Raises RewardFault, or EnvironmentFault if
    reading a value raises an exception."""
    head = f"data.reward {name} returned"
    form = f"return one finite number for each of the {num_wanted} completions"
    if may_be_none:
        form = f"{form}, or None where the reward doesn't apply"
    # A set has no order that completions could follow.
    if isinstance(values, (*_TEXTS, Mapping, Set)) or not isinstance(values, Collection):
        raise RewardFault(f"{head} a {type(values).__name__}; {form}, in a list")
    with Foreign(f"data.reward {name}: reading what it returned", are_faults=True):
        listed = list(values)
        if len(listed) != num_wanted:
            raise RewardFault(f"{head} {len(listed)} values; {form}")
        scores: list[float | None] = []
        for value in listed:
            is_none = value is None and may_be_none
            scores.append(None if is_none else _number(value, listed, head, form))
        return scores


def read_numbers(values: Any, num_wanted: int, name: str) -> list[float]:
    """As `read_scores`, but without None."""
    scores = read_scores(values, num_wanted, name, may_be_none=False)
    return [score for score in scores if score is not None]


def read_metric(value: Any, metric: str, name: str) -> float:
    """The number under the name `metric` that the reward `name` reports. Raises RewardFault if it isn't
    one."""
    head = f"data.reward {name} reports {metric}:"
    with Foreign(f"data.reward {name}: reading {metric}", are_faults=True):
        return _number(value, [value], head, "a metric is one finite number")


def is_number(value: Any) -> bool:
    """Whether a value can be a metric, rather than a text, a list, or nothing."""
    if not isinstance(value, SupportsFloat) or isinstance(value, _TEXTS):
        return False
    if not isinstance(value, Collection):
        return True
    try:
        len(value)
    except TypeError:  # a tensor or array without dimensions
        return True
    return False


def _number(value: Any, listed: Sequence[Any], head: str, form: str) -> float:
    # Numpy's texts are Python's texts too, and float() would read "1" as 1 and drop the imaginary part of
    # numpy's numbers.
    is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
    if isinstance(value, _TEXTS) or is_complex:
        raise RewardFault(f"{head} {reprlib.repr(value)}, a {type(value).__name__}; {form}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as fault:
        raise RewardFault(f"{head} {_shown(listed)} ({_reason(fault)}); {form}") from fault
    if not abs(number) <= MAX_ABS:
        raise RewardFault(f"{head} {number}; {form}, at most ±{MAX_ABS:g}")
    return number


def _shown(values: Sequence[Any]) -> str:
    return reprlib.repr(list(values))


def _reason(fault: Exception) -> str:
    lines = str(fault).splitlines() or [type(fault).__name__]
    return lines[0][:120]
