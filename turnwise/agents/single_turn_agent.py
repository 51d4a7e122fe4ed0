"""The agent for rows of a data set: one prompt and one response, or a conversation with a simulated user."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from turnwise.data.rewards import prompt_of
from turnwise.protocols import Conversation, OpenConversation
from turnwise.tools.session import Interactions, InteractionSession
from turnwise.types import CallOptions, Limit, Message, SamplingParams, Status, Task, Trajectory


@dataclass(frozen=True, slots=True)
class RowAgentSettings:
    """Settings of the agents for rows. An episode that reaches a limit has ended, not failed."""

    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of messages."""
    max_new_tokens: int = 512
    """Maximum tokens per response."""
    max_assistant_turns: int | None = None
    """Maximum responses; None = as many as the context holds."""
    max_user_turns: int | None = None
    """Maximum messages of a simulated user; None = as many as the context holds."""


class SingleTurnAgent:
    """Answers the prompt of a row once. If the row names a simulated user, that user may reply to each answer. If a response is
    cut at its length, the trajectory is `truncated`."""

    def __init__(self, settings: RowAgentSettings, interactions: Interactions | None = None) -> None:
        self._settings = settings
        self._interactions = interactions or Interactions()

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        """One trajectory. It has one turn if there is no simulated user."""
        async with self._interactions.open(task, sibling, self._settings.max_user_turns) as user:
            # A user's message comes from outside: it must not forge a turn.
            conversation = open_conversation(sampling, encode_special_tokens=not user.is_there)
            limit = await self._converse(user, conversation, prompt_of(task.payload, self._settings.prompt_key))
            metrics = await user.metrics()
        status: Status = "truncated" if limit else "finished"
        return [Trajectory(task, sibling, conversation.turns, status=status, limit=limit, metrics=metrics)]

    async def _converse(
        self, user: InteractionSession, conversation: Conversation, messages: Sequence[Message]
    ) -> Limit | None:
        settings, said = self._settings, list[Message]()
        for turn_idx in count(1):
            reply = await conversation.generate(messages, CallOptions(settings.max_new_tokens))
            # If the user's last message leaves no room, the context ends before it.
            if reply is None:
                return "sequence_length"
            if conversation.turns[-1].finish_reason == "length":
                return cut_by(conversation)
            said += [*messages, reply]
            messages = await user.reply(said, conversation.turns[-1])
            if not messages:
                return user.limit
            if turn_idx == settings.max_assistant_turns:
                return "max_steps"
        raise AssertionError("count never ends")


def cut_by(conversation: Conversation) -> Limit:
    """The limit that cut the last response: its own, unless its context is full."""
    return "max_new_tokens" if conversation.remaining_tokens() > 0 else "sequence_length"
