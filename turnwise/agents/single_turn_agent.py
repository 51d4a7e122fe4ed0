"""The agent for rows of a data set without tools: one prompt and one response, or a conversation with a
simulated user."""

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.data.prompts import prompt_of
from turnwise.protocols import Conversation, OpenConversation
from turnwise.tools.interactions import Interactions, InteractionSession
from turnwise.types import CallOptions, Limit, Message, SamplingParams, Status, Task, Trajectory


@dataclass(frozen=True, slots=True)
class RowAgentSettings:
    """Settings of the agents for rows of a data set. An episode that a limit cuts counts as truncated, not as
    failed."""

    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of messages."""
    max_new_tokens: int = 512
    """Maximum tokens per response."""
    max_assistant_turns: int | None = None
    """Maximum responses per episode; None = as many as fit into the context."""
    max_user_turns: int | None = None
    """Maximum messages of a simulated user per episode; None = as many as fit into the context."""


class SingleTurnAgent:
    """Answers the prompt of a row once. If the row names a simulated user, that user may reply to each
    answer."""

    def __init__(self, settings: RowAgentSettings, interactions: Interactions | None = None) -> None:
        self._settings = settings
        self._interactions = interactions or Interactions()

    async def run(
        self,
        task: Task,
        sibling: int,
        open_conversation: OpenConversation,
        sampling: SamplingParams,
    ) -> list[Trajectory]:
        """One trajectory: finished, or truncated by a limit. It has one turn if there is no simulated
        user."""
        users = self._interactions
        async with users.open(
            task,
            sibling,
            self._settings.max_user_turns,
            open_conversation,
        ) as user:
            # Special tokens in a user's message would forge a turn.
            conversation = open_conversation(sampling, encode_special_tokens=not user.is_there)
            prompt = prompt_of(task.payload, self._settings.prompt_key)
            limit = await self._converse(user, conversation, prompt)
            metrics = await user.metrics()
        status: Status = "truncated" if limit else "finished"
        return [
            Trajectory(
                task,
                sibling,
                conversation.turns,
                status=status,
                limit=limit,
                metrics=metrics,
            )
        ]

    async def _converse(
        self,
        user: InteractionSession,
        conversation: Conversation,
        messages: Sequence[Message],
    ) -> Limit | None:
        settings = self._settings
        transcript: list[Message] = []
        while True:
            reply = await conversation.generate(messages, CallOptions(settings.max_new_tokens))
            if reply is None:  # the user's last message leaves no room for a response
                return "sequence_length"
            if conversation.turns[-1].finish_reason == "length":
                return cut_by(conversation)
            transcript += [*messages, reply]
            messages = await user.reply(transcript, conversation.turns[-1])
            if not messages:
                return user.limit
            if len(conversation.turns) == settings.max_assistant_turns:
                return "max_steps"


def cut_by(conversation: Conversation) -> Limit:
    """The limit that cut the last response: `sequence_length` if the context is full, else
    `max_new_tokens`."""
    return "max_new_tokens" if conversation.remaining_tokens() > 0 else "sequence_length"
