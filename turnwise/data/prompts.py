"""Reads the messages of a row's prompt, whatever form of file it comes from."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.data.padding import are_messages, plain_schema, without_padding
from turnwise.types import Message


def prompt_of(
    columns: Mapping[str, Any],
    prompt_key: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Message]:
    """The messages of a row's prompt; a string is one user message. `tools` are schemas of tools that the
    messages may call, beside those in the row's column `tools`.

    Keys with null are left out, at any depth, because tables pad objects with nulls; `content` stays, and so
    does an argument that the called tool's schema allows to be null. A call's arguments that are JSON text
    become an object.
    """
    prompt = columns[prompt_key]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    schemas = [*tools, *tools_of(columns)]
    return [_with_objects(message) for message in without_padding(prompt, schemas)]


def has_messages(columns: Mapping[str, Any]) -> bool:
    """Whether a column is a list of messages."""
    return any(map(are_messages, columns.values()))


def has_calls(columns: Mapping[str, Any]) -> bool:
    """Whether a message of a column has tool calls."""
    for value in columns.values():
        if are_messages(value) and any(message.get("tool_calls") for message in value):
            return True
    return False


def with_plain_messages(
    columns: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The columns with every list of messages as `prompt_of` reads it."""
    plain = dict(columns)
    for name, value in columns.items():
        if are_messages(value):
            plain[name] = prompt_of(columns, name, tools)
    return plain


def tools_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas in a row's column `tools`, a list or JSON text of one, without padding. [] if the column
    holds anything else, as rows of reinforcement learning may."""
    tools = read_tools(columns.get("tools"))
    if not isinstance(tools, list):
        return []
    return [plain_schema(tool) for tool in tools if isinstance(tool, Mapping)]


def read_tools(value: Any) -> Any:
    """The schemas in a column `tools`: a list or JSON text of one. An entry that is a function's schema
    alone, as in ShareGPT's rows, gets the object around it that other rows write."""
    tools = read_list(value)
    if not isinstance(tools, list):
        return tools
    return [_with_type(tool) if isinstance(tool, Mapping) else tool for tool in tools]


def _with_type(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    is_named = tool.get("function") is None and isinstance(tool.get("name"), str)
    if not is_named or not isinstance(tool.get("parameters"), Mapping):
        return tool
    function = {key: value for key, value in tool.items() if key not in ("type", "function")}
    return {"type": "function", "function": function}


def read_list(value: Any) -> Any:
    """The list that a text holds as JSON; every other value as it is. Files that can't nest objects hold
    lists as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _with_objects(message: Message) -> Message:
    """The message with the arguments of its calls as objects: OpenAI writes JSON text, while chat templates
    read an object."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    with_objects = [_with_object(call) for call in calls]
    return {**message, "tool_calls": with_objects}


def _with_object(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
    return {**call, "function": {**function, "arguments": arguments}}
