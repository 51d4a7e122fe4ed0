"""Reads the contents of messages: their texts, and the images and other parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from turnwise.errors import ChatTemplateError
from turnwise.types import Media, Message

Messages = Sequence[Message]


def media_of(messages: Messages) -> tuple[Media, ...]:
    """The images in the messages' parts `{"type": "image", "image": Media or uint8 [H, W, 3]}`, in order."""
    images = [part.get("image") for part in _parts(messages) if part.get("type") == "image"]
    return tuple(map(_media, images))


def _media(image: Any) -> Media:
    if isinstance(image, Media):
        return image
    return Media("image", np.asarray(image, np.uint8))


def text_of_last(messages: Messages) -> str:
    """The text of the last message; "" if there is none."""
    if not messages:
        return ""
    content = messages[-1]["content"]
    if isinstance(content, str):
        return content
    parts = _parts(messages[-1:])
    return "".join(part.get("text", "") for part in parts)


def _parts(messages: Messages) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts += content
    return parts


def key_of(messages: Messages) -> tuple[tuple[str, str], ...] | None:
    """A cache key for messages that each have only a role and a text; None if one of them has more.

    >>> key_of([{"role": "user", "content": "Where to?"}])
    (('user', 'Where to?'),)
    >>> key_of([{"role": "tool", "content": "4", "tool_call_id": "a"}])
    """
    key = []
    for message in messages:
        role = message.get("role")
        content = message.get("content")
        if len(message) != 2 or not isinstance(role, str) or not isinstance(content, str):
            return None
        key.append((role, content))
    return tuple(key)


def texts_of(message: Message) -> Iterator[str]:
    """The texts in a message's content.

    >>> list(texts_of({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}))
    ['what?']
    """
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield part["text"]


def num_characters_of(messages: Messages) -> int:
    """Number of characters of the messages' texts, without surrounding white space, which some templates
    drop. Raises ChatTemplateError if `messages` isn't a list of mappings."""
    try:
        texts = chain.from_iterable(map(texts_of, messages))
        return sum(len(text.strip()) for text in texts)
    except (AttributeError, TypeError):
        raise ChatTemplateError(
            "a list of messages, each a mapping with `role` and `content`, was expected; got "
            f"{str(messages)[:80]!r}"
        ) from None


def with_texts(message: Message, change: Callable[[str], str]) -> Message:
    """The message with `change` applied to each text of its content."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part in content:
        if isinstance(part.get("text"), str):
            part = {**part, "text": change(part["text"])}
        parts.append(part)
    return {**message, "content": parts}


def as_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def as_parts(message: Message) -> Message:
    """The message with its text as a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": as_part(content)}


def message_of(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def continued(messages: Messages) -> tuple[Messages, str]:
    """The messages before a response, and the words with which the response begins: those of a last
    assistant's message. Raises ChatTemplateError if this message has tool calls, which only a result can
    follow."""
    if not messages or messages[-1].get("role") != "assistant":
        return messages, ""
    if messages[-1].get("tool_calls"):
        raise ChatTemplateError(
            "the last message has tool calls: put a result of role tool behind it for each call"
        )
    return messages[:-1], "".join(texts_of(messages[-1]))
