"""Demonstrations for supervised fine-tuning: JSONL files of rows `{"messages": [...]}`, with `tools` if messages call any."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.errors import DataError
from turnwise.hub import local_path
from turnwise.jsonl import read_jsonl
from turnwise.types import Message

_FORM = 'a row is a line of JSON: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_CALL = '{"type": "function", "function": {"name", %s}}'
_ROLES = ("system", "user", "assistant", "tool")


class DemonstrationRow(NamedTuple):
    """One row: its file and line, its messages, and the schemas of the tools that the messages may call."""

    place: str
    messages: list[Message]
    tools: Sequence[Mapping[str, Any]] = ()


def read_rows(paths: Sequence[str | Path]) -> Iterator[DemonstrationRow]:
    """Yields the rows of all files in order; `~` in a path is the home folder. Raises DataError if a file is missing or
    empty, or if a row is wrong; then the error names the line."""
    for path in map(local_path, paths):
        place = None
        for place, record in read_jsonl(path):
            if problem := _problem(record):
                raise DataError(f"{place}: {problem}; {_FORM}")
            yield DemonstrationRow(place, record["messages"], record.get("tools") or ())
        if place is None:
            raise DataError(f"{path} is empty; {_FORM}")


def read_demonstrations(paths: Sequence[str | Path]) -> list[list[Message]]:
    """The message lists of `read_rows`."""
    return [row.messages for row in read_rows(paths)]


def _problem(record: dict[str, Any]) -> str:
    """Why the record isn't a row; empty if it is one."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        return f"has `messages` {str(messages)[:40]!r}" if "messages" in record else "has no `messages`"
    tools = record.get("tools") or []
    if not isinstance(tools, list) or not all(map(_is_named, tools)):
        return f"has `tools` {str(tools)[:40]!r}, which must be a list of schemas {_CALL % 'description, parameters'}"
    return next(filter(None, (message_problem(index, message) for index, message in enumerate(messages))), "")


def message_problem(index: int, message: Any) -> str:
    """Why this can't be message number `index` of a conversation; empty if it can."""
    if not isinstance(message, dict):
        return f"message {index} is {str(message)[:40]!r}; it must be an object"
    if message.get("role") not in _ROLES:
        return f"message {index} has the role {str(message.get('role'))[:40]!r}; allowed are {', '.join(_ROLES)}"
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(_is_named, calls)) or not all(map(_has_arguments, calls)):
        return f"message {index} has the tool_calls {str(calls)[:40]!r}; it must be a list of {_CALL % 'arguments'}"
    content = "" if calls and message.get("content") is None else message.get("content")
    parts = content if isinstance(content, list) else []
    if not isinstance(content, str | list) or not all(isinstance(part, dict) for part in parts):
        return f"message {index} has the content {str(content)[:40]!r}; it must be a string"
    if any(str(part.get("type")).startswith("image") for part in parts):
        return f"message {index} has a picture, and no model of this version reads pictures; leave it out"
    return ""


def _is_named(entry: Any) -> bool:
    function = entry.get("function") if isinstance(entry, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _has_arguments(call: dict[str, Any]) -> bool:
    """Whether the call's arguments are an object, or JSON text of an object."""
    arguments = call["function"].get("arguments", {})
    try:
        return isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)
    except (ValueError, RecursionError):
        return False
