"""Makes the assistant's message of a sampled response: its text, and the tool calls in it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.chat.rendering import Tools
from turnwise.chat.template import ChatTemplate
from turnwise.protocols.tools import ReadsTurnTokens, ToolCall, ToolCallParser
from turnwise.types import Message

_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The ids that Mistral's template takes."""


@dataclass(frozen=True, slots=True)
class ReplyReader:
    """Reads responses. Without a `parser`, messages have no tool calls."""

    template: ChatTemplate
    parser: ToolCallParser | None

    def text(
        self, response_ids: Sequence[int], stop_token_ids: Sequence[int], skips_turn_tokens: bool = True
    ) -> str:
        """The decoded response, without a stop token at its end."""
        is_stopped = bool(response_ids) and response_ids[-1] in stop_token_ids
        if is_stopped:
            response_ids = response_ids[:-1]
        return self.template.decode(response_ids, skips_turn_tokens)

    def calls(
        self,
        response_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        words: str,
        tools: Tools,
        number: int,
    ) -> Message:
        """The `tool_calls` and `call_errors` of response `number`, which continues `words`; {} without tools
        or parser."""
        if self.parser is None or not tools:
            return {}
        # In some families of models the tokens of turns also mark calls; their parser asks for them.
        needs_turn_tokens = isinstance(self.parser, ReadsTurnTokens) and self.parser.reads_turn_tokens
        text = self.text(response_ids, stop_token_ids, not needs_turn_tokens)
        parsed = self.parser.parse(words + text, tools)
        call_ids = _ids_of(parsed.tool_calls, number)
        calls = list(map(in_openai_form, parsed.tool_calls, call_ids))
        return {"tool_calls": calls, "call_errors": list(parsed.errors)}


def _ids_of(calls: Sequence[ToolCall], number: int) -> list[str]:
    """The model's own ids if all have the form that every template takes, and differ; else ids that are made
    here."""
    sampled_ids = [call.id for call in calls]
    are_valid = all(map(_CALL_ID.fullmatch, sampled_ids))
    if are_valid and len(set(sampled_ids)) == len(sampled_ids):
        return sampled_ids
    return [f"t{number:03d}c{index:04d}" for index in range(len(calls))]


def in_openai_form(call: ToolCall, call_id: str) -> Message:
    """The call as OpenAI's messages have it."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call_id, "type": "function", "function": function}
