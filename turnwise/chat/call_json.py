"""Reads JSON in sampled text. Whatever a model writes, the values are JSON that can be written again."""

import json
import math
import re
from typing import Any

from turnwise.protocols.tools import ToolCall

_MAX_NESTING = 100
_MAX_BITS = 14_000  # of an integer; Python writes at most 4,300 digits
_SPACE = re.compile(r"\s*")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Unreadable(Exception):
    """A call can't be read. The message says why."""


def _no_number(name: str) -> Any:
    raise Unreadable(f"{name} isn't a JSON number")


JSON_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)


def json_at(text: str, position: int) -> tuple[Any, int]:
    """The JSON value that begins at `position`, after white space, and the position after it. Raises
    Unreadable if there is none. An error takes time in proportion to the length of the text."""
    try:
        return JSON_DECODER.raw_decode(text, skip_space(text, position))
    except json.JSONDecodeError as error:
        problem = error.msg
    except ValueError:  # an integer of more than 4,300 digits
        problem = "a number is too long"
    except RecursionError:
        problem = "it is nested too deeply"
    raise Unreadable(f"its JSON is wrong ({problem})")


def json_value(value: Any, depth: int = 0) -> Any:
    """The value with tuples as lists and with U+FFFD in place of lone surrogates, which no encoding can
    write. Raises Unreadable if it isn't JSON: an infinite number, one of too many digits, a set, bytes, a
    complex number, a key that isn't a text; or if it is nested more than 100 times."""
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise Unreadable("a number is too long")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Unreadable(f"{value} isn't a JSON number")
        return value
    if depth == _MAX_NESTING:
        raise Unreadable("it is nested too deeply")
    if isinstance(value, list | tuple):
        return [json_value(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        raise Unreadable(f"a {type(value).__name__} isn't a JSON value")
    for key in value:
        if not isinstance(key, str):
            raise Unreadable(f"the key {str(key)[:40]} isn't a text")
    return {json_value(key): json_value(item, depth + 1) for key, item in value.items()}


def call_of(value: Any) -> ToolCall:
    """The call that a JSON value describes. Its arguments may be called `parameters`, or be JSON text. Raises
    Unreadable if the value describes no call."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value | value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise Unreadable("it names no function")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments, _ = json_at(arguments, 0)
    if not isinstance(arguments, dict):
        raise Unreadable(f"the arguments of {name} aren't an object")
    call_id = value.get("id")
    if not isinstance(call_id, str):
        call_id = ""
    return ToolCall(json_value(name), json_value(arguments), json_value(call_id))


def skip_space(text: str, position: int) -> int:
    """The position of the first character at or after `position` that isn't white space."""
    space = _SPACE.match(text, position)
    assert space is not None, "no space at all matches too"
    return space.end()
