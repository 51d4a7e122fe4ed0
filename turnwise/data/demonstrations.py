"""Demonstrations for supervised fine-tuning: rows `{"messages": [...]}`, with `tools` if messages call
any."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.data.bad_rows import BadRows
from turnwise.data.forms import as_demonstration, form_hint
from turnwise.data.padding import plain_schema, without_padding
from turnwise.data.prompts import read_list, read_tools
from turnwise.data.tables import TableRow, read_tables
from turnwise.errors import DataError
from turnwise.types import Message

_FORM = (
    'a row is a line of JSON: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
    '"content": "..."}]}'
)
_CALL = '{"type": "function", "function": {"name", %s}}'
_ROLES = ("system", "user", "assistant", "tool")


class DemonstrationRow(NamedTuple):
    """One row: its file and line, its messages, the schemas of the tools that the messages may call, and all
    its columns."""

    place: str
    messages: list[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    columns: Mapping[str, Any] = {}


def read_rows(
    paths: Sequence[str | Path],
    key: str = "train_files",
    form: str | None = None,
    bad: BadRows | None = None,
) -> Iterator[DemonstrationRow]:
    """Yields the rows of all sources in order; `read_tables` says what a source may be. Nulls with which
    tables pad objects are left out. `form` is one of `turnwise.data.forms.COLUMNS`; None = `messages`. Wrong
    rows are added to `bad` and left out.

    Raises DataError if a source is missing, empty or unreadable, or, without `bad`, if rows are wrong; it
    names the lines."""
    bad_rows = BadRows() if bad is None else bad
    rows = []
    for row in read_tables([str(path) for path in paths], key, bad_rows):
        try:
            rows.append(_read(row, form))
        except DataError as fault:
            bad_rows.add(f"{row.place}: {fault}")
    if bad is None:
        bad_rows.refuse("repair or remove them")
    yield from rows


def _read(row: TableRow, form: str | None) -> DemonstrationRow:
    """Raises DataError, without the row's place, if the row is wrong."""
    record = row.columns if form is None else as_demonstration(row.columns, form)
    messages = read_list(record.get("messages"))
    tools = read_tools(record.get("tools"))
    if messages is None and "messages" not in row.columns and form is None:
        raise DataError(f"has no `messages`; {_FORM}.{form_hint(row.columns)}")
    tools = plain_schema(tools or [])
    problem = _problem(messages, tools)
    if problem:
        raise DataError(f"{problem}; {_FORM}")
    plain = without_padding(messages, tools)
    return DemonstrationRow(row.place, plain, tools or (), row.columns)


def read_demonstrations(paths: Sequence[str | Path]) -> list[list[Message]]:
    """The message lists of `read_rows`."""
    return [row.messages for row in read_rows(paths)]


def _problem(messages: Any, tools: Any) -> str:
    """Why these aren't the messages and tools of a row; empty if they are."""
    if not isinstance(messages, list) or not messages:
        return f"has `messages` {str(messages)[:40]!r}"
    if not isinstance(tools, list) or not all(map(_is_named, tools)):
        return (
            f"has `tools` {str(tools)[:40]!r}, which must be a list of schemas "
            f"{_CALL % 'description, parameters'}"
        )
    for index, message in enumerate(messages):
        problem = message_problem(index, message)
        if problem:
            return problem
    return ""


def message_problem(index: int, message: Any) -> str:
    """Why this can't be message number `index` of a conversation; empty if it can."""
    if not isinstance(message, dict):
        return f"message {index} is {str(message)[:40]!r}; it must be an object"
    if message.get("role") not in _ROLES:
        return (
            f"message {index} has the role {str(message.get('role'))[:40]!r}; allowed are {', '.join(_ROLES)}"
        )
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_named(call) and _has_arguments(call) for call in calls):
        return (
            f"message {index} has the tool_calls {str(calls)[:40]!r}; it must be a list of "
            f"{_CALL % 'arguments'}"
        )
    content = message.get("content")
    if calls and content is None:
        content = ""
    parts = content if isinstance(content, list) else []
    if not isinstance(content, str | list) or not all(isinstance(part, dict) for part in parts):
        return f"message {index} has the content {str(content)[:40]!r}; it must be a string"
    if any(str(part.get("type")).startswith("image") for part in parts):
        return f"message {index} has a picture, and no model of this version reads pictures; remove it"
    return ""


def _is_named(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    function = entry.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _has_arguments(call: dict[str, Any]) -> bool:
    """Whether the call's arguments are an object, or JSON text of an object."""
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
    return isinstance(arguments, dict)
