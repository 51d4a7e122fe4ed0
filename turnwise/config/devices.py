"""Device ranks from the text forms of `device_mapping`, parsed and never evaluated."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

MAX_DEVICES = 65_536
"""More ranks than this are a typing error, found before a list of them is made."""

_INTEGER = r"\s*(-?\d{1,9})\s*"
_RANGE = re.compile(rf"\s*(?:list\(\s*)?range\({_INTEGER}(?:,{_INTEGER})?(?:,{_INTEGER})?\)(\s*\))?\s*")
_LIST = re.compile(rf"\s*\[(?:{_INTEGER}(?:,{_INTEGER})*)?,?\s*\]\s*")
_FORMS = "a list of ranks such as [0, 1], or a text such as 'list(range(0, 8))' or 'list(range(0,4)) + [6]'"


def parse_devices(text: str) -> list[int]:
    """The ranks of `list(range(…))`, `[…]` and sums of them, in order.

    >>> parse_devices("list(range(0, 4)) + [6]")
    [0, 1, 2, 3, 6]

    Raises:
        ValueError: any other text.
    """
    ranks: list[int] = []
    for term in text.split("+"):
        ranks += _parse_term(term, text)
        if len(ranks) > MAX_DEVICES:
            raise ValueError(f"{text!r} names more than {MAX_DEVICES} devices")
    return ranks


def _parse_term(term: str, text: str) -> range | list[int]:
    if match := _RANGE.fullmatch(term):
        bounds = [int(number) for number in match.groups()[:3] if number is not None]
        is_list = term.lstrip().startswith("list")
        if is_list == bool(match.group(4)) and (len(bounds) < 3 or bounds[2] != 0):
            return range(*bounds)
    if _LIST.fullmatch(term):
        return [int(number) for number in re.findall(r"-?\d+", term)]
    raise ValueError(f"{text!r} isn't {_FORMS}")


def _devices(value: Any) -> Any:
    ranks = parse_devices(value) if isinstance(value, str) else value
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise ValueError(f"expected {_FORMS}")
    if not ranks:
        raise ValueError(f"{value!r} names no device; leave the key out to use this process")
    if min(ranks) < 0:
        raise ValueError(f"device ranks start at 0, got {min(ranks)}")
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise ValueError(f"device {twice[0]} is named twice")
    return ranks


DeviceRanks = Annotated[list[int], BeforeValidator(_devices)]
