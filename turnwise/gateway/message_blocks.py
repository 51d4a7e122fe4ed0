"""The system prompt, the messages and the tools of `/v1/messages` in the form of OpenAI's chat."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.gateway.dialect import GatewayError, function_tool
from turnwise.types import Message

BILLING_LINE = "x-anthropic-billing-header"
"""The name of a line in the system prompt that changes with every request, and would split each of them
off."""
_ROLES = ("user", "assistant", "system")
_SERVER_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset", "advisor")
"""Types of tools that the server would run; a date follows."""
_BETWEEN_SYSTEM_TEXTS = "\n\n"


def system_of(system: Any) -> tuple[str, list[str]]:
    """The system prompt's text, its blocks as paragraphs, and the names of the lines that were cut from
    it."""
    texts = [system] if isinstance(system, str) else list(_texts(system, "system"))
    kept = []
    removed = []
    for text in texts:
        lines = text.split("\n")
        others = [line for line in lines if not line.startswith(f"{BILLING_LINE}:")]
        if len(others) < len(lines):
            removed.append(BILLING_LINE)
        if any(others):
            kept.append("\n".join(others))
    return _BETWEEN_SYSTEM_TEXTS.join(kept), list(dict.fromkeys(removed))


def messages_of(messages: Sequence[Any]) -> list[Message]:
    """The messages. A user's message becomes one of role `tool` for each result in it, and one with its
    texts. Raises GatewayError for a message or a block that can't be read."""
    read: list[Message] = []
    for position, message in enumerate(messages):
        label = f"messages[{position}]"
        if not isinstance(message, Mapping):
            raise GatewayError(f"{label} must be an object", param=label)
        role = message.get("role")
        if role not in _ROLES:
            raise GatewayError(f"{label}.role is {role!r}; allowed: {', '.join(_ROLES)}", param=label)
        content = message.get("content")
        place = f"{label}.content"
        if isinstance(content, str):
            read.append({"role": role, "content": content})
        elif role == "assistant":
            read.append(_answer(content, place))
        elif role == "user":
            read += _of_user(content, place)
        else:
            read.append({"role": role, "content": "".join(_texts(content, place))})
    return read


def tools_of(tools: Sequence[Any]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The tools, and the types of those that the server would run. Raises GatewayError for a tool whose
    schema only its maker's models know."""
    functions: list[Mapping[str, Any]] = []
    dropped: list[str] = []
    for index, tool in enumerate(tools):
        label = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise GatewayError(f"{label} must be an object", param=label)
        kind = str(tool.get("type") or "custom")
        if kind.startswith(_SERVER_TOOLS):
            dropped.append(f"tool {kind}")
        elif kind == "custom":
            name = tool.get("name")
            functions.append(function_tool(name, tool.get("description"), tool.get("input_schema")))
        else:
            raise GatewayError(
                f"{label} is of type {kind[:80]!r}, which isn't served: the model doesn't know its schema; "
                "send `name`, `description` and `input_schema`",
                param=label,
            )
    return functions, list(dict.fromkeys(dropped))


def _answer(content: Any, label: str) -> Message:
    """An assistant's message. Thinking that can't be read counts as left out."""
    texts: list[str] = []
    thinking: list[str] = []
    calls = []
    for place, kind, block in _blocks(content, label, ("text", "thinking", "redacted_thinking", "tool_use")):
        if kind == "text":
            texts.append(_text(block, "text", place))
        elif kind == "thinking":
            thinking.append(_text(block, "thinking", place))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": _text(block, "id", place), "type": "function", "function": function})
    answer: Message = {"role": "assistant", "content": "".join(texts)}
    if thinking:
        answer["reasoning_content"] = "".join(thinking)
    if calls:
        answer["tool_calls"] = calls
    return answer


def _of_user(content: Any, label: str) -> Iterator[Message]:
    """The messages of a user's blocks, in their order; texts that follow each other are one message."""
    texts: list[str] = []
    for place, kind, block in _blocks(content, label, ("text", "tool_result")):
        if kind == "text":
            texts.append(_text(block, "text", place))
            continue
        if texts:
            yield {"role": "user", "content": "".join(texts)}
            texts = []
        result = block.get("content")
        if not isinstance(result, str):
            result = "".join(_texts(result, f"{place}.content"))
        yield {"role": "tool", "content": result, "tool_call_id": _text(block, "tool_use_id", place)}
    if texts or not content:
        yield {"role": "user", "content": "".join(texts)}


def _texts(content: Any, label: str) -> Iterator[str]:
    for place, _, block in _blocks(content, label, ("text",)):
        yield _text(block, "text", place)


def _blocks(content: Any, label: str, allowed: Sequence[str]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """A label, the type and the block, for each block."""
    if content is None:
        return
    if not isinstance(content, list):
        raise GatewayError(f"{label} must be a text or a list of blocks", param=label)
    for index, block in enumerate(content):
        place = f"{label}[{index}]"
        kind = type(block).__name__
        if isinstance(block, Mapping):
            kind = str(block.get("type"))
        if kind not in allowed:
            raise GatewayError(
                f"{place} is a block of type {kind[:80]!r}, which isn't served here; allowed: "
                f"{', '.join(allowed)}",
                param=label,
            )
        yield place, kind, block


def _text(block: Mapping[str, Any], key: str, label: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise GatewayError(f"{label}.{key} is {str(value)[:80]!r}; it must be a text", param=label)
    return value
