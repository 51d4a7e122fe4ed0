"""Reads the messages of a client that sends its whole history with each request: what of them is compared
with earlier ones, and what is rendered.

A key is what makes two messages the same: role, text, calls, thinking, and for a result the call that it
answers. Ids, `name`, `refusal`, `cache_control` and whatever else clients add are no part of it, and never
reach the template, so that tokens depend on keys alone."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from turnwise.chat.message_content import Messages
from turnwise.chat.rendering import Tools
from turnwise.errors import RequestError
from turnwise.types import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The role of a message → the role of its key."""
_ROLES_OF_TEXTS = {role: key for role, key in ROLES.items() if role != "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_MAX_SHOWN = 80


class CallKey(NamedTuple):
    """A call: its tool, and its arguments as JSON with sorted keys."""

    name: str
    arguments: str


class MessageKey(NamedTuple):
    """What makes two messages the same."""

    role: str
    text: str
    calls: tuple[CallKey, ...] = ()
    thinking: str = ""
    answered: int | None = None
    """The call that a result answers: its position among all calls before, from 0."""


@dataclass(frozen=True, slots=True)
class History:
    """The messages of a request."""

    keys: tuple[MessageKey, ...]

    @property
    def num_answers(self) -> int:
        """Number of assistants' messages."""
        return sum(key.role == "assistant" for key in self.keys)

    def call_ids(self, sampled_ids: Sequence[str] = ()) -> list[str]:
        """The ids of all calls, in order. Those of the first calls are `sampled_ids`; others get ids from
        their positions."""
        call_ids: list[str] = []
        number = 0
        for key in self.keys:
            number += key.role == "assistant"
            if key.calls:
                call_ids += [id_of_call(number, index) for index in range(len(key.calls))]
        return [*sampled_ids, *call_ids[len(sampled_ids) :]]

    def messages(self, start: int = 0, sampled_ids: Sequence[str] = ()) -> list[Message]:
        """The messages from position `start` on, as a template gets them, with `call_ids`."""
        call_ids = self.call_ids(sampled_ids)
        names = [call.name for key in self.keys for call in key.calls]
        num_calls = sum(len(key.calls) for key in self.keys[:start])
        messages: list[Message] = []
        for key in self.keys[start:]:
            message: Message = {"role": key.role, "content": key.text}
            if key.thinking:
                message["reasoning_content"] = key.thinking
            if key.calls:
                message["tool_calls"] = list(_in_openai_form(key.calls, call_ids[num_calls:]))
            if key.answered is not None:
                message["name"] = names[key.answered]
                message["tool_call_id"] = call_ids[key.answered]
            num_calls += len(key.calls)
            messages.append(message)
        return messages


def id_of_call(number: int, index: int) -> str:
    """The id of call `index` of the assistant's message `number`, in the form that every template takes."""
    return f"t{number:03d}c{index:04d}"


def read_history(messages: Messages) -> History:
    """Reads the messages of a request. Raises RequestError if there are none, the last one is an assistant's,
    or one of them can't be read."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("`messages` must be a list with at least one message")
    reader = _Reader()
    keys = tuple(reader.key(message, position) for position, message in enumerate(messages))
    if keys[-1].role == "assistant":
        raise RequestError(
            "the last message is an assistant's: end the list with a message of role user, system or tool"
        )
    return History(keys)


def late_systems_as_users(messages: Messages, is_start: bool) -> list[Message]:
    """The messages, with a user's in place of each system message that doesn't open a context."""
    changed: list[Message] = []
    for position, message in enumerate(messages):
        is_late = position > 0 or not is_start
        if is_late and message["role"] == "system":
            message = {**message, "role": "user"}
        changed.append(message)
    return changed


def key_of_reply(message: Message) -> MessageKey:
    """The key of a sampled message."""
    calls = tuple(_call_key(call["function"], "a sampled call") for call in message.get("tool_calls") or ())
    return MessageKey(
        "assistant",
        message["content"],
        calls,
        message.get("reasoning_content") or "",
    )


def is_sent_back(reply: MessageKey, key: MessageKey, is_exact: bool) -> bool:
    """Whether a client's message is the sampled `reply`: nothing differs, though unless `is_exact` the
    thinking, and the text beside calls, may be left out.

    >>> reply = MessageKey("assistant", "Let me see.", (CallKey("add", "{}"),), "hm")
    >>> is_sent_back(reply, reply._replace(text="", thinking=""), is_exact=False)
    True
    >>> is_sent_back(reply, reply._replace(text="Let me"), is_exact=False)
    False
    """
    if is_exact or reply == key:
        return reply == key
    has_same_text = key.text == reply.text or (key.text == "" and bool(reply.calls))
    has_same_thinking = key.thinking in ("", reply.thinking)
    return key.role == reply.role and key.calls == reply.calls and has_same_text and has_same_thinking


def canonical(value: Any, label: str) -> str:
    """JSON with sorted keys. Raises RequestError if the value isn't JSON."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as fault:
        raise RequestError(f"{label} isn't JSON: {fault}") from None


def read_tools(tools: Tools) -> list[Mapping[str, Any]]:
    """The schemas with name, description and parameters alone, as all dialects bring them. Raises
    RequestError if one of them is no schema, or two have one name."""
    read: list[Mapping[str, Any]] = []
    names: set[str] = set()
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{number}] must have a `function` with a `name`")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise RequestError(f"tools[{number}].function.parameters must be a JSON schema")
        if function["name"] in names:
            raise RequestError(f"tools[{number}]: two tools have the name {function['name']!r}")
        names.add(function["name"])
        shown = {key: function[key] for key in ("name", "description", "parameters") if function.get(key)}
        read.append({"type": "function", "function": shown})
    return read


class _Reader:
    """Reads messages one after the other."""

    def __init__(self) -> None:
        self._positions: dict[str, int] = {}  # id of a call → its position
        self._num_calls = 0
        self._answered: set[int] = set()

    def key(self, message: Message, position: int) -> MessageKey:
        # A history of texts is read again with each request: what only errors need is made for them alone.
        if type(message) is dict and len(message) == 2:
            role = message.get("role")
            content = message.get("content")
            if type(role) is str and role in _ROLES_OF_TEXTS and type(content) is str:
                return MessageKey(_ROLES_OF_TEXTS[role], content)
        return self._checked_key(message, f"messages[{position}]")

    def _checked_key(self, message: Message, label: str) -> MessageKey:
        if not isinstance(message, Mapping):
            raise RequestError(f"{label} is {str(message)[:_MAX_SHOWN]!r}; it must be an object")
        role = ROLES.get(str(message.get("role")))
        if role is None:
            raise RequestError(f"{label}.role is {message.get('role')!r}; allowed: {', '.join(ROLES)}")
        text = _text(message.get("content"), label)
        if role == "tool":
            return MessageKey(role, text, answered=self._answered_by(message, label))
        if role != "assistant":
            return MessageKey(role, text)
        calls: tuple[CallKey, ...] = ()
        if message.get("tool_calls"):
            calls = tuple(self._calls(message["tool_calls"], label))
        thinking = message.get("reasoning_content") or message.get("reasoning") or ""
        return MessageKey(role, text, calls, thinking if isinstance(thinking, str) else "")

    def _calls(self, calls: Any, label: str) -> Iterator[CallKey]:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise RequestError(f"{label}.tool_calls must be a list of calls")
        for index, call in enumerate(calls):
            place = f"{label}.tool_calls[{index}]"
            if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
                raise RequestError(f"{place} must be an object with `id` and `function`")
            self._positions[str(call.get("id"))] = self._num_calls
            self._num_calls += 1
            yield _call_key(call["function"], f"{place}.function")

    def _answered_by(self, message: Message, label: str) -> int:
        call_id = message.get("tool_call_id")
        position = self._positions.get(str(call_id))
        if position is None:
            raise RequestError(
                f"{label}.tool_call_id is {call_id!r}, and no message before it has a call of this id"
            )
        if position in self._answered:
            raise RequestError(f"{label} is a second result of the call {call_id!r}: send one result a call")
        self._answered.add(position)
        return position


def _text(content: Any, label: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{label}.content must be a text, a list of text parts, or null")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"{label}.content has a part of type {kind!r}; allowed: {', '.join(_TEXT_PARTS)}"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{label}.content has a part of type {part['type']!r} without `text`")
        texts.append(part["text"])
    return "".join(texts)


def _call_key(function: Mapping[str, Any], label: str) -> CallKey:
    name = function.get("name")
    if not isinstance(name, str):
        raise RequestError(f"{label}.name is {name!r}; it must be a text")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return CallKey(name, json.dumps(arguments, ensure_ascii=False))
    return CallKey(name, canonical(arguments, f"{label}.arguments"))


def _in_openai_form(calls: Sequence[CallKey], call_ids: Sequence[str]) -> Iterator[Message]:
    for call, call_id in zip(calls, call_ids, strict=False):
        function = {"name": call.name, "arguments": json.loads(call.arguments)}
        yield {"id": call_id, "type": "function", "function": function}
