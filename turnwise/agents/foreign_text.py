"""Runs an agent so that special tokens spelt out in its environment's text can't forge a turn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.chat.contexts import opens_trees
from turnwise.chat.tree import ConversationTree
from turnwise.protocols import AgentLoop, Conversation, HearsCalls, OpenConversation
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
    """Opens contexts for foreign text, unless the agent says otherwise, and passes on the calls of tools."""

    open_conversation: OpenConversation

    def __call__(self, sampling: SamplingParams, **options: Any) -> Conversation:
        return self.open_conversation(sampling, **{"encode_special_tokens": False, **options})

    def open_tree(self, sampling: SamplingParams, **options: Any) -> ConversationTree:
        return opens_trees(self.open_conversation, "the agent").open_tree(sampling, **options)

    def called(
        self,
        name: str,
        arguments: Mapping[str, Any],
        result: str,
        seconds: float,
    ) -> None:
        if isinstance(self.open_conversation, HearsCalls):
            self.open_conversation.called(name, arguments, result, seconds)
