"""Plays one episode and shows it turn by turn, as the policy sees it. Agent, template and contexts are those
of training."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from turnwise.chat.contexts import TokenContexts
from turnwise.chat.conversation import Complete, TextAnswer, TextConversation
from turnwise.chat.ledger import Prompt
from turnwise.chat.message_content import Messages
from turnwise.chat.rendering import Tools
from turnwise.chat.tree import Answer
from turnwise.errors import RolloutError, TurnwiseError
from turnwise.play.policies import PlayStopped
from turnwise.protocols import AgentLoop, EpisodeObserver
from turnwise.rollout.observed import ObservedContexts
from turnwise.rollout.player import EpisodeContexts
from turnwise.rollout.tasks import sibling_sampling
from turnwise.runtime.stacks import describe_error
from turnwise.types import Group, Message, SamplingParams, Task, Trajectory


class ShownPrompt(NamedTuple):
    """The new part of the policy's input before a response, and the response's token limit."""

    added_ids: Sequence[int]
    """New token ids of the context; empty for a policy that takes text."""
    messages: Sequence[Message]
    """New messages; empty for a policy that takes tokens."""
    num_before: int
    """Number of the context's tokens before `added_ids`."""
    max_new_tokens: int
    parent: int | None = None
    """The turn whose context is continued, if a tree was asked and that isn't the newest turn."""


class Onlooker(EpisodeObserver, Protocol):
    """An observer that also sees each prompt as the policy gets it."""

    def prompted(self, prompt: ShownPrompt) -> None:
        """Told after `asked`, before the policy answers."""


OpenContexts = Callable[[Onlooker], EpisodeContexts]
"""Makes the contexts of an episode, which show the onlooker each prompt."""


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode that has ended."""

    trajectory: Trajectory
    is_left: bool
    """Whether the player stopped the episode."""


def show_tokens(onlooker: Onlooker, contexts: TokenContexts) -> TokenContexts:
    """The contexts of a policy that samples tokens; they show the onlooker each prompt."""

    def on_prompt(prompt: Prompt, sampling: SamplingParams) -> None:
        onlooker.prompted(
            ShownPrompt(prompt.added_ids, (), prompt.prefix.num_tokens, sampling.max_new_tokens)
        )

    def on_commit(answer: Answer, messages: Messages) -> None:
        turn = answer.turn
        budget = turn.sampling.max_new_tokens if turn.sampling else len(turn.response_ids)
        added_ids = turn.prompt_ids.tolist()
        parent = None if turn.parent == answer.node - 1 else turn.parent
        onlooker.prompted(
            ShownPrompt(
                added_ids,
                (),
                answer.usage.prompt - len(added_ids),
                budget,
                parent,
            )
        )

    return replace(contexts, on_prompt=on_prompt, on_commit=on_commit)


@dataclass(frozen=True, slots=True)
class TextContexts:
    """Opens the contexts of a policy that answers in text, and shows the onlooker each prompt."""

    complete: Complete
    onlooker: Onlooker

    def __call__(self, sampling: SamplingParams, tools: Tools = (), **options: Any) -> TextConversation:
        async def shown(
            messages: Sequence[Message], sampling: SamplingParams, tools: Tools = ()
        ) -> TextAnswer | None:
            new_messages = messages[len(conversation.messages) :]
            self.onlooker.prompted(ShownPrompt((), new_messages, 0, sampling.max_new_tokens))
            return await self.complete(messages, sampling, tools)

        conversation = TextConversation(shown, sampling, tools)
        return conversation

    def verify(self) -> None:
        """Does nothing: texts have no tokens."""

    async def close(self) -> None:
        """Does nothing: no server keeps state."""


async def play_episode(
    agent: AgentLoop,
    task: Task,
    sampling: SamplingParams,
    contexts: EpisodeContexts,
    onlooker: Onlooker,
    score: Callable[[Group], Awaitable[Any]] | None = None,
) -> PlayedEpisode:
    """Plays a task, and scores the episode with `score`. An episode that the player stops is returned
    unscored, with the status `truncated`. A TurnwiseError of the agent is raised unchanged; any other
    exception of the agent becomes a RolloutError."""
    observed = ObservedContexts(contexts, onlooker)
    episode = agent.run(task, 0, observed, sibling_sampling(sampling, task, 0))
    [outcome] = await asyncio.gather(episode, return_exceptions=True)
    if isinstance(outcome, TurnwiseError):
        raise outcome
    if isinstance(outcome, BaseException) and not isinstance(outcome, PlayStopped):
        raise RolloutError(f"the episode ended with an exception\n{describe_error(outcome)}") from outcome
    observed.tell_rewards()
    contexts.verify()
    if isinstance(outcome, PlayStopped):
        stopped = Trajectory(
            task=task,
            sibling=0,
            turns=observed.turns,
            status="truncated",
        )
        onlooker.ended([stopped], outcome)
        return PlayedEpisode(stopped, is_left=True)
    if score is not None:
        await score(Group(task, list(outcome)))
    onlooker.ended(outcome, None)
    return PlayedEpisode(outcome[0], is_left=False)
