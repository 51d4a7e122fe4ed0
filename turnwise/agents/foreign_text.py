"""Runs an agent so that special tokens spelt out in its environment's text can't forge a turn."""

from dataclasses import dataclass
from functools import partial

from turnwise.protocols import AgentLoop, OpenConversation
from turnwise.types import SamplingParams, Task, Trajectory


@dataclass(frozen=True, slots=True)
class OverForeignText:
    """Runs `agent` in contexts where special tokens that are spelt out in messages of users and tools stay ordinary text."""

    agent: AgentLoop

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        return await self.agent.run(task, sibling, partial(open_conversation, encode_special_tokens=False), sampling)
