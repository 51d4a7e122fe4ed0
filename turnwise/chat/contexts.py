"""Opens what an episode's agent talks to the model through: conversations in one context, and trees of
requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from turnwise.chat.conversation import TokenConversation
from turnwise.chat.message_content import Messages
from turnwise.chat.sampler import OnPrompt
from turnwise.chat.template import ChatTemplate
from turnwise.chat.token_requests import TokenRequests
from turnwise.chat.tree import Answer, ConversationTree, OnCommit
from turnwise.errors import ConfigError
from turnwise.protocols import OpenConversation, PolicyServer
from turnwise.protocols.tools import ToolCallParser
from turnwise.spec import MatchRule
from turnwise.types import SamplingParams, derive_seed


@runtime_checkable
class OpensTrees(Protocol):
    """An OpenConversation that can also open a tree, for agents that send their whole history with each
    request. `max_turns` is the maximum number of responses. `on_commit` is called with each sampled answer,
    before the client gets it."""

    def open_tree(
        self,
        sampling: SamplingParams,
        *,
        match: MatchRule = "omitted",
        max_turns: int | None = None,
        encode_special_tokens: bool = False,
        on_commit: OnCommit | None = None,
    ) -> ConversationTree: ...


def opens_trees(open_conversation: OpenConversation, agent: str) -> OpensTrees:
    """`open_conversation` as one that opens trees. Raises ConfigError for one that can't, such as that of a
    person or a foreign model that plays in text."""
    if isinstance(open_conversation, OpensTrees):
        return open_conversation
    raise ConfigError(
        f"{agent} sends its whole history with each request, which needs a model that samples tokens here: "
        "play it with a model folder or a checkpoint"
    )


@runtime_checkable
class OpensTokens(Protocol):
    """An OpenConversation that can also open requests of token ids, for agents that make their prompts
    themselves."""

    def open_tokens(self, sampling: SamplingParams) -> TokenRequests: ...


def opens_tokens(open_conversation: OpenConversation, agent: str) -> OpensTokens:
    """`open_conversation` as one that opens requests of token ids. Raises ConfigError like `opens_trees`."""
    if isinstance(open_conversation, OpensTokens):
        return open_conversation
    raise ConfigError(
        f"{agent} asks for responses to token ids, which needs a model that samples tokens here: play it "
        "with a model folder or a checkpoint"
    )


_Opened = TokenConversation | ConversationTree | TokenRequests


@dataclass(frozen=True)
class TokenContexts:
    """Opens the conversations of one episode over one server, and its trees of requests. `episode_id` must be
    unique among running episodes, since servers keep KV caches under request ids that begin with it. The
    `parser` reads tool calls in contexts opened with tools. `on_prompt` is called with each prompt of a
    conversation before the server is asked, and `on_commit` with each answer of a tree, whose requests run at
    once."""

    template: ChatTemplate
    server: PolicyServer
    max_length: int
    episode_id: str
    parser: ToolCallParser | None = None
    on_prompt: OnPrompt | None = None
    on_commit: OnCommit | None = None
    _opened: list[_Opened] = field(init=False, default_factory=list)

    def __call__(
        self,
        sampling: SamplingParams,
        *,
        parent: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        encode_special_tokens: bool = True,
    ) -> TokenConversation:
        index = len(self._opened)
        request_id = f"{self.episode_id}/{index}"
        template = self.template if encode_special_tokens else self.template.without_special_tokens
        conversation = TokenConversation(
            template,
            self.server,
            request_id,
            _sampling_of_context(sampling, index),
            self.max_length,
            parent=parent,
            tools=tools,
            parser=self.parser,
            opens_episode=index == 0,
            on_prompt=self.on_prompt,
        )
        self._opened.append(conversation)
        return conversation

    def open_tree(
        self,
        sampling: SamplingParams,
        *,
        match: MatchRule = "omitted",
        max_turns: int | None = None,
        encode_special_tokens: bool = False,
        on_commit: OnCommit | None = None,
    ) -> ConversationTree:
        """Opens a tree for an agent whose requests have the whole history (see `OpensTrees`)."""
        index = len(self._opened)
        tree = ConversationTree(
            self.template,
            self.server,
            f"{self.episode_id}/{index}",
            _sampling_of_context(sampling, index),
            self.max_length,
            parser=self.parser,
            match=match,
            max_turns=max_turns,
            encode_special_tokens=encode_special_tokens,
            on_commit=self._both(on_commit),
        )
        self._opened.append(tree)
        return tree

    def _both(self, on_commit: OnCommit | None) -> OnCommit | None:
        """`on_commit` after that of these contexts."""
        first = self.on_commit
        if first is None or on_commit is None:
            return first or on_commit

        def both(answer: Answer, messages: Messages) -> None:
            first(answer, messages)
            on_commit(answer, messages)

        return both

    def open_tokens(self, sampling: SamplingParams) -> TokenRequests:
        """Opens requests of token ids (see `OpensTokens`)."""
        index = len(self._opened)
        stop_token_ids = dict.fromkeys([*sampling.stop_token_ids, *self.template.stop_token_ids])
        sampling = replace(_sampling_of_context(sampling, index), stop_token_ids=tuple(stop_token_ids))
        name = f"{self.episode_id}/{index}"
        requests = TokenRequests(self.template, self.server, self.max_length, name, sampling)
        self._opened.append(requests)
        return requests

    def verify(self) -> None:
        """Raises RolloutError unless the turns of every context have the ids that the server saw. Call it
        before `close`."""
        for opened in self._opened:
            opened.verify()

    async def close(self) -> None:
        for opened in self._opened:
            await opened.close()
        self._opened.clear()


def _sampling_of_context(sampling: SamplingParams, index: int) -> SamplingParams:
    # Turns are counted from 0 in each context, so the contexts of an episode need seeds of their own.
    return replace(sampling, seed=derive_seed(sampling.seed, "context", index))
