"""A Conversation with a model that is reached by text alone. It can't be trained on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from turnwise.chat.rendering import Tools
from turnwise.tool_protocols import ToolCall
from turnwise.types import FinishReason, Message, SamplingParams, Turn, derive_seed

_NO_LIMIT = 2**31


class TextAnswer(NamedTuple):
    """The answer of a model that takes and gives text."""

    text: str
    finish_reason: FinishReason
    generate_s: float = 0.0
    tool_calls: tuple[ToolCall, ...] = ()


Complete = Callable[[Sequence[Message], SamplingParams, Tools], Awaitable[TextAnswer]]
"""Answers a whole conversation, with the schemas of the tools that may be called."""


class TextConversation:
    """A Conversation over chat messages. Its turns hold texts and no tokens, and its context length is unknown.

    >>> import asyncio
    >>> async def echo(messages, sampling, tools):
    ...     return TextAnswer(messages[-1]["content"], "stop")
    >>> conversation = TextConversation(echo, SamplingParams(max_new_tokens=8))
    >>> asyncio.run(conversation.generate([{"role": "user", "content": "Hi"}]))
    {'role': 'assistant', 'content': 'Hi'}
    """

    def __init__(self, complete: Complete, sampling: SamplingParams, tools: Tools = ()) -> None:
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._complete = complete
        self._sampling = sampling
        self._tools = tools

    async def generate(self, new_messages: Sequence[Message], max_new_tokens: int | None = None) -> Message | None:
        limit = self._sampling.max_new_tokens
        sampling = replace(
            self._sampling,
            max_new_tokens=limit if max_new_tokens is None else min(limit, max_new_tokens),
            seed=derive_seed(self._sampling.seed, len(self.turns)),
        )
        answer = await self._complete([*self.messages, *new_messages], sampling, self._tools)
        reply: Message = {"role": "assistant", "content": answer.text}
        if answer.tool_calls:
            functions = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in answer.tool_calls]
            reply["tool_calls"] = [{"id": name, "type": "function", "function": function} for name, function in functions]
        self.messages += [*new_messages, reply]
        no_ids = np.zeros(0, np.int64)
        self.turns.append(
            Turn(
                prompt_ids=no_ids,
                response_ids=no_ids,
                logprobs=np.zeros(0, np.float32),
                finish_reason=answer.finish_reason,
                text=answer.text,
                starts_context=not self.turns,
                generate_s=answer.generate_s,
            )
        )
        return reply

    def remaining_tokens(self) -> int:
        return _NO_LIMIT

    async def close(self) -> None:
        """Does nothing: no server keeps anything for it."""
