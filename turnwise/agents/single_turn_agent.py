"""The agent of rows: one prompt, one response."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.data.rewards import prompt_of
from turnwise.protocols import OpenConversation
from turnwise.types import SamplingParams, Task, Trajectory


@dataclass(frozen=True, slots=True)
class RowAgentSettings:
    """Settings of the agents of rows."""

    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of messages."""
    max_new_tokens: int = 512
    """Tokens of a response at most."""


class SingleTurnAgent:
    """Answers the prompt of a row once. A response that is cut at its length gives a trajectory `truncated` by it."""

    def __init__(self, settings: RowAgentSettings) -> None:
        self._settings = settings

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        """One trajectory of one turn.

        Raises:
            RolloutError: the prompt leaves no room in its context.
        """
        conversation = open_conversation(sampling)
        messages = prompt_of(task.payload, self._settings.prompt_key)
        await conversation.generate(messages, max_new_tokens=self._settings.max_new_tokens)
        [turn] = conversation.turns
        is_cut = turn.finish_reason == "length"
        return [
            Trajectory(
                task=task,
                sibling=sibling,
                turns=[turn],
                status="truncated" if is_cut else "finished",
                limit="sequence_length" if is_cut else None,
            )
        ]
