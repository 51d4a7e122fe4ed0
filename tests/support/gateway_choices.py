"""Answers as the gateway's dialects get them, and the events that they write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from turnwise.chat.forest import Usage
from turnwise.gateway.dialect import Choice, TokenLogprob
from turnwise.types import Message


def choice_of(
    text: str,
    thinking: str = "",
    calls: Sequence[tuple[str, Any]] = (),
    finish_reason: str | None = None,
    logprobs: Sequence[tuple[str, float, tuple[int, ...]]] | None = None,
) -> Choice:
    """An answer with 10 tokens of prompt, of which 2 were there before, and 5 of response."""
    message: Message = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {
                "id": f"t001c{index:04d}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    if finish_reason is None:
        finish_reason = "tool_calls" if calls else "stop"
    tokens = None
    if logprobs is not None:
        tokens = tuple(TokenLogprob(*entry) for entry in logprobs)
    return Choice(message, finish_reason, Usage(10, 2, 5), tokens)


def events_of(stream: Iterable[bytes]) -> list[tuple[str | None, Any]]:
    """Name and JSON of each server-sent event."""
    events = []
    for text in b"".join(stream).decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith(":"))
        if "data" in fields:
            events.append((fields.get("event"), json.loads(fields["data"])))
    return events
