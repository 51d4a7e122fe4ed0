"""Any agent, in contexts whose environment can't forge a turn."""

from __future__ import annotations

from functools import partial

from turnwise.protocols import AgentLoop, OpenConversation
from turnwise.types import SamplingParams, Task, Trajectory


class OverForeignText:
    """Opens the agent's contexts without special tokens in what users and tools say."""

    def __init__(self, agent: AgentLoop) -> None:
        self._agent = agent

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        opened = partial(open_conversation, encode_special_tokens=False)
        return await self._agent.run(task, sibling, opened, sampling)
