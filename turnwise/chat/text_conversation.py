"""A Conversation with a model that is reached by text alone. It can't be trained on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from turnwise.types import FinishReason, Message, SamplingParams, Turn, derive_seed

_NO_LIMIT = 2**31


class TextAnswer(NamedTuple):
    """The answer of a model that takes and gives text."""

    text: str
    finish_reason: FinishReason
    generate_s: float = 0.0


Complete = Callable[[Sequence[Message], SamplingParams], Awaitable[TextAnswer]]
"""Answers a whole conversation."""


class TextConversation:
    """A Conversation over chat messages. Its turns hold texts and no tokens, and its context length is unknown.

    >>> import asyncio
    >>> async def echo(messages, sampling):
    ...     return TextAnswer(messages[-1]["content"], "stop")
    >>> conversation = TextConversation(echo, SamplingParams(max_new_tokens=8))
    >>> asyncio.run(conversation.generate([{"role": "user", "content": "Hi"}]))
    {'role': 'assistant', 'content': 'Hi'}
    """

    def __init__(self, complete: Complete, sampling: SamplingParams) -> None:
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._complete = complete
        self._sampling = sampling

    async def generate(self, new_messages: Sequence[Message], max_new_tokens: int | None = None) -> Message | None:
        limit = self._sampling.max_new_tokens
        sampling = replace(
            self._sampling,
            max_new_tokens=limit if max_new_tokens is None else min(limit, max_new_tokens),
            seed=derive_seed(self._sampling.seed, len(self.turns)),
        )
        answer = await self._complete([*self.messages, *new_messages], sampling)
        reply = {"role": "assistant", "content": answer.text}
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
