"""The agent of rows: one prompt and one response, or a conversation with a simulated user."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from turnwise.data.rewards import prompt_of
from turnwise.protocols import Conversation, OpenConversation
from turnwise.tools.session import Interactions, InteractionSession
from turnwise.types import CallOptions, Limit, Message, SamplingParams, Task, Trajectory


@dataclass(frozen=True, slots=True)
class RowAgentSettings:
    """Settings of the agents of rows. Reaching a limit is an outcome."""

    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of messages."""
    max_new_tokens: int = 512
    """Tokens of a response at most."""
    max_assistant_turns: int | None = None
    """Most responses; None = as many as the context holds."""
    max_user_turns: int | None = None
    """Most messages of a simulated user; None = as many as the context holds."""


class SingleTurnAgent:
    """Answers the prompt of a row once. A simulated user, where the row names one, may reply to each answer. A response that is
    cut at its length gives a trajectory `truncated` by it."""

    def __init__(self, settings: RowAgentSettings, interactions: Interactions | None = None) -> None:
        self._settings = settings
        self._interactions = interactions or Interactions()

    async def run(
        self, task: Task, sibling: int, open_conversation: OpenConversation, sampling: SamplingParams
    ) -> list[Trajectory]:
        """One trajectory, of one turn if there is no user."""
        async with self._interactions.open(task, sibling, self._settings.max_user_turns) as user:
            # A user's message is text from outside: it must not forge a turn.
            conversation = open_conversation(sampling, encode_special_tokens=not user.is_there)
            limit = await self._converse(user, conversation, prompt_of(task.payload, self._settings.prompt_key))
            metrics = await user.metrics()
        return [
            Trajectory(
                task=task,
                sibling=sibling,
                turns=conversation.turns,
                status="truncated" if limit else "finished",
                limit=limit,
                metrics=metrics,
            )
        ]

    async def _converse(
        self, user: InteractionSession, conversation: Conversation, messages: Sequence[Message]
    ) -> Limit | None:
        settings, said = self._settings, list[Message]()
        for turn_idx in count(1):
            reply = await conversation.generate(messages, CallOptions(settings.max_new_tokens))
            # The user's last message leaves no room, so the context ends before it.
            if reply is None or conversation.turns[-1].finish_reason == "length":
                return "sequence_length"
            said += [*messages, reply]
            messages = await user.reply(said, conversation.turns[-1])
            if not messages:
                return user.limit
            if turn_idx == settings.max_assistant_turns:
                return "max_steps"
        raise AssertionError("count ends never")
