"""Makes the assistant's message of a sampled response: the text around its tool calls, the calls, and the
thinking."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turnwise.chat.rendering import Tools
from turnwise.chat.template import ChatTemplate
from turnwise.chat.thinking_tags import split_thinking
from turnwise.protocols.tools import ParsedResponse, ReadsTurnTokens, ToolCall, ToolCallParser
from turnwise.types import Message, Turn

_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The ids that Mistral's template takes."""


_THINKING_TAG = re.compile("</?think>")


class Reply(NamedTuple):
    """The assistant's message of a response, in the three forms in which it is used."""

    message: Message
    """For agents, clients and simulated users: `content` is the text around the calls, `reasoning_content`
    the thinking, if there is any."""
    rendered: Message
    """For a prompt that shows the response again: thinking stays in its tags, as every template reads it. It
    begins with the words that the response continues."""
    sampled: Message
    """As it was sampled: `content` is the whole text, words included."""


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

    def reply(
        self,
        response_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        words: str,
        tools: Tools,
        number: int,
    ) -> Reply:
        """The message of response `number`, which continues `words`."""
        text = words + self.text(response_ids, stop_token_ids)
        parsed = self._parsed(response_ids, stop_token_ids, words, tools)
        calls: Message = {}
        around = text
        if parsed is not None:
            call_ids = _ids_of(parsed.tool_calls, number)
            in_form = list(map(in_openai_form, parsed.tool_calls, call_ids))
            calls = {"tool_calls": in_form, "call_errors": list(parsed.errors)}
            if in_form:
                around = parsed.content
        role: Message = {"role": "assistant"}
        is_opened = self.template.opens_thinking or words.lstrip().startswith("<think>")
        thinking, answer = split_thinking(around.removeprefix(words), is_opened and "</think>" not in words)
        if thinking:
            answer = answer.lstrip()
        message = {**role, "content": answer, **calls}
        if thinking:
            message["reasoning_content"] = _THINKING_TAG.sub("", thinking).strip()
        return Reply(
            message,
            rendered={**role, "content": around, **calls},
            sampled={**role, "content": text, **calls},
        )

    def _parsed(
        self, response_ids: Sequence[int], stop_token_ids: Sequence[int], words: str, tools: Tools
    ) -> ParsedResponse | None:
        """The calls of a response that continues `words`; None without tools or parser."""
        if self.parser is None or not tools:
            return None
        # In some families of models the tokens of turns also mark calls; their parser asks for them.
        needs_turn_tokens = isinstance(self.parser, ReadsTurnTokens) and self.parser.reads_turn_tokens
        text = self.text(response_ids, stop_token_ids, not needs_turn_tokens)
        return self.parser.parse(words + text, tools)


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


def until_stop(message: Message, stop: Sequence[str]) -> Message:
    """The message up to the first stop string in its text."""
    text = message["content"]
    ends = [position for mark in stop if (position := text.find(mark)) >= 0]
    if not ends:
        return message
    return {**message, "content": text[: min(ends)]}


def finish_reason_of(turn: Turn, message: Message) -> str:
    """`stop`, `length` or `tool_calls`, as OpenAI names the ends of an answer."""
    if turn.finish_reason == "length":
        return "length"
    return "tool_calls" if message.get("tool_calls") else "stop"
