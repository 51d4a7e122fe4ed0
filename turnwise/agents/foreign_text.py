"""Runs an agent so that special tokens spelt out in its environment's text can't forge a turn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.chat.contexts import opens_tokens, opens_trees
from turnwise.chat.token_requests import TokenRequests
from turnwise.chat.tree import ConversationTree
from turnwise.protocols import AgentLoop, Conversation, HearsCalls, HearsUsers, OpenConversation
from turnwise.types import SamplingParams, Task, Trajectory


@dataclass(frozen=True, slots=True)
class OverForeignText:
    """Runs `agent` in contexts where special tokens that are spelt out in messages of users and tools stay
    ordinary text."""

    agent: AgentLoop

    async def run(
        self,
        task: Task,
        sibling: int,
        open_conversation: OpenConversation,
        sampling: SamplingParams,
    ) -> list[Trajectory]:
        contexts = _ForeignContexts(open_conversation)
        return await self.agent.run(task, sibling, contexts, sampling)


@dataclass(frozen=True, slots=True)
class _ForeignContexts:
    """Opens contexts for foreign text, unless the agent says otherwise, and passes on what tools and
    users answer."""

    open_conversation: OpenConversation

    def __call__(self, sampling: SamplingParams, **options: Any) -> Conversation:
        return self.open_conversation(sampling, **{"encode_special_tokens": False, **options})

    def open_tree(self, sampling: SamplingParams, **options: Any) -> ConversationTree:
        return opens_trees(self.open_conversation, "the agent").open_tree(sampling, **options)

    def open_tokens(self, sampling: SamplingParams) -> TokenRequests:
        return opens_tokens(self.open_conversation, "the agent").open_tokens(sampling)

    def called(
        self,
        name: str,
        arguments: Mapping[str, Any],
        result: str,
        seconds: float,
        *,
        is_error: bool = False,
        waited_s: float = 0.0,
    ) -> None:
        contexts = self.open_conversation
        if isinstance(contexts, HearsCalls):
            contexts.called(name, arguments, result, seconds, is_error=is_error, waited_s=waited_s)

    def replied(self, text: str, seconds: float) -> None:
        if isinstance(self.open_conversation, HearsUsers):
            self.open_conversation.replied(text, seconds)
