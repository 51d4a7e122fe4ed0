"""The contexts of one episode. Its agent opens them; those still open are closed when the episode is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.chat.conversation import TokenConversation
from turnwise.chat.template import ChatTemplate
from turnwise.protocols import PolicyServer
from turnwise.tool_protocols import ToolCallParser
from turnwise.types import SamplingParams, derive_seed


class TokenContexts:
    """Opens token ledgers over one server, with request ids of this episode's own.

    `episode_id` must be unique among running episodes, since servers keep KV under request ids made from it. The `parser` reads
    tool calls in contexts that are opened with tools.
    """

    def __init__(
        self,
        template: ChatTemplate,
        server: PolicyServer,
        max_length: int,
        episode_id: str,
        parser: ToolCallParser | None = None,
    ) -> None:
        self._template = template
        self._server = server
        self._max_length = max_length
        self._episode_id = episode_id
        self._parser = parser
        self._conversations: list[TokenConversation] = []

    def __call__(
        self,
        sampling: SamplingParams,
        *,
        parent: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        encode_special_tokens: bool = True,
    ) -> TokenConversation:
        index = len(self._conversations)
        request_id = f"{self._episode_id}/{index}"
        # Turns count from 0 in each context, so the contexts of an episode need seeds of their own.
        sampling = replace(sampling, seed=derive_seed(sampling.seed, "context", index))
        conversation = TokenConversation(
            self._template if encode_special_tokens else self._template.without_special_tokens,
            self._server,
            request_id,
            sampling,
            self._max_length,
            parent=parent,
            tools=tools,
            parser=self._parser,
            opens_episode=index == 0,
        )
        self._conversations.append(conversation)
        return conversation

    def verify(self) -> None:
        """Checks of every context, closed ones too, that its turns add up to what the server saw.

        Raises:
            RolloutError: a turn was changed after it was sampled.
        """
        for conversation in self._conversations:
            conversation.verify()

    async def close(self) -> None:
        for conversation in self._conversations:
            await conversation.close()
        self._conversations.clear()
