"""The input items of `/v1/responses` as messages, and its tools.

One answer of the model is several items there: its reasoning, its text, and each of its calls. Items that
follow each other become one assistant's message again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.gateway.dialect import GatewayError, function_tool
from turnwise.types import Message

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_SERVER_TOOLS = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "tool_search",
    "programmatic_tool_calling",
)
"""Types of tools that the server would run; a date may follow."""
_SEPARATOR = "__"
"""Stands between a namespace and the name of its tool."""


def messages_of(given: Any) -> list[Message]:
    """The messages of the field `input`. Raises GatewayError for an item that can't be read."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise GatewayError("`input` must be a text or a list of items", param="input")
    reader = _Reader()
    for position, item in enumerate(given):
        reader.add(item, f"input[{position}]")
    return reader.messages


def tools_of(tools: Sequence[Any]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The tools in the form of OpenAI's chat, those of a namespace as `NAMESPACE__NAME`, and the types of
    those that the server would run. Raises GatewayError for a tool of another type."""
    functions: list[Mapping[str, Any]] = []
    dropped: list[str] = []
    for label, namespace, tool in _flattened(tools):
        kind = str(tool.get("type"))
        if kind == "function":
            name = flat_name(namespace, _named(tool, "name", label))
            functions.append(function_tool(name, tool.get("description"), tool.get("parameters")))
        elif kind.startswith(_SERVER_TOOLS):
            dropped.append(f"tool {kind}")
        else:
            raise GatewayError(
                f"{label} is of type {kind!r}, which isn't served; make it a function, with `name`, "
                "`description` and `parameters`",
                param=label,
            )
    return functions, list(dict.fromkeys(dropped))


def names_of(tools: Any) -> dict[str, tuple[str, str]]:
    """The name under which the model knows a tool of a namespace → the namespace, and its name there."""
    names = {}
    for _, namespace, tool in _flattened(tools or ()):
        if namespace is not None and isinstance(tool.get("name"), str):
            names[flat_name(namespace, tool["name"])] = (namespace, tool["name"])
    return names


def flat_name(namespace: str | None, name: str) -> str:
    """The name under which the model knows a tool. Two namespaces may have tools of one name."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def _flattened(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """A label, the namespace if there is one, and the tool, for each tool."""
    for index, tool in enumerate(tools):
        label = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise GatewayError(f"{label} must be an object", param=label)
        if tool.get("type") != "namespace":
            yield label, None, tool
            continue
        name = tool.get("name")
        members = tool.get("tools")
        if not isinstance(name, str) or not isinstance(members, list):
            raise GatewayError(f"{label}: a namespace must have a `name` and a list of `tools`", param=label)
        for number, member in enumerate(members):
            if not isinstance(member, Mapping):
                raise GatewayError(f"{label}.tools[{number}] must be an object", param=label)
            yield f"{label}.tools[{number}]", name, member


class _Reader:
    """Reads items one after the other."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._answer: Message | None = None
        """The assistant's message that the next item may be a part of."""

    def add(self, item: Any, label: str) -> None:
        if not isinstance(item, Mapping):
            raise GatewayError(f"{label} must be an object", param=label)
        kind = item.get("type")
        if kind is None:
            # An item with a role needs no type.
            kind = "message"
        if kind == "reasoning":
            self._begin_answer()["reasoning_content"] = _thinking(item)
        elif kind == "function_call":
            self._add_call(item, label)
        elif kind == "function_call_output":
            self._answer = None
            text = text_of(item.get("output"), f"{label}.output", _TEXT_PARTS)
            result = {"role": "tool", "content": text, "tool_call_id": _named(item, "call_id", label)}
            self.messages.append(result)
        elif kind == "message":
            self._add_message(item, label)
        else:
            raise GatewayError(
                f"{label} is of type {kind!r}, which isn't served; allowed: {', '.join(_ITEMS)}", param=label
            )

    def _add_message(self, item: Mapping[str, Any], label: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise GatewayError(f"{label}.role is {role!r}; allowed: {', '.join(_ROLES)}", param=label)
        text = text_of(item.get("content"), f"{label}.content", _TEXT_PARTS)
        if role == "assistant":
            answer = self._answer
            if answer is None or answer["content"] is not None or "tool_calls" in answer:
                answer = self._begin_answer()
            answer["content"] = text
            return
        self._answer = None
        self.messages.append({"role": role, "content": text})

    def _add_call(self, item: Mapping[str, Any], label: str) -> None:
        name = flat_name(item.get("namespace"), _named(item, "name", label))
        function = {"name": name, "arguments": item.get("arguments")}
        answer = self._answer
        if answer is None:
            answer = self._begin_answer()
        call = {"id": _named(item, "call_id", label), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)

    def _begin_answer(self) -> Message:
        answer: Message = {"role": "assistant", "content": None}
        self.messages.append(answer)
        self._answer = answer
        return answer


def text_of(content: Any, label: str, allowed: Sequence[str]) -> str:
    """The text of a message's or a result's content: a text, null, or a list of parts, joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise GatewayError(f"{label} must be a text or a list of text parts", param=label)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in allowed:
            raise GatewayError(
                f"{label} has a part of type {str(kind)[:80]!r}, which isn't served: the model reads text "
                f"alone; allowed: {', '.join(allowed)}",
                param=label,
            )
        if not isinstance(part.get("text"), str):
            raise GatewayError(f"{label} has a part of type {kind!r} without a `text`", param=label)
        texts.append(part["text"])
    return "".join(texts)


def _named(item: Mapping[str, Any], key: str, label: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise GatewayError(f"{label}.{key} is {str(value)[:80]!r}; it must be a text", param=label)
    return value


def _thinking(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item. Clients may send it back without; then it is left out."""
    parts = item.get("content")
    if not isinstance(parts, list):
        return ""
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))
