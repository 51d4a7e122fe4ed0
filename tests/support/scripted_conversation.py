"""A Conversation whose responses are written down beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from turnwise.types import AS_OPENED, CallOptions, Message, Turn


class ScriptedConversation:
    """Answers with `texts`, one a turn, and has no room left after the last; a token is a character.

    `messages` holds everything that was said, and `budgets` the `max_new_tokens` of each request, for tests
    to look at.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.budgets: list[int | None] = []
        self._texts = list(texts)

    async def generate(
        self, new_messages: Sequence[Message], options: CallOptions = AS_OPENED
    ) -> Message | None:
        if not self._texts:
            return None
        text = self._texts.pop(0)
        reply = {"role": "assistant", "content": text}
        self.messages += [*new_messages, reply]
        self.budgets.append(options.max_new_tokens)
        prompt = "".join(str(message["content"]) for message in new_messages)
        self.turns.append(
            Turn(
                prompt_ids=np.array([ord(c) for c in prompt], np.int64),
                response_ids=np.array([ord(c) for c in text], np.int64),
                logprobs=np.zeros(len(text), np.float32),
                text=text,
            )
        )
        return reply

    async def close(self) -> None:
        pass

    def remaining_tokens(self) -> int:
        return sum(len(text) for text in self._texts)
