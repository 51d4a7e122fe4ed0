"""Plays one episode and shows it turn by turn, as the policy sees it. Agent, template and contexts are those of training."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from turnwise.build.play_policies import PlayStopped
from turnwise.chat.conversation import Complete, TextAnswer, TextConversation, TokenContexts
from turnwise.chat.rendering import Tools
from turnwise.chat.template import ChatTemplate
from turnwise.errors import RolloutError, TurnwiseError
from turnwise.protocols import AgentLoop, Conversation, OpenConversation
from turnwise.rollout.tasks import sibling_sampling
from turnwise.runtime.stacks import describe_error
from turnwise.tool_protocols import ToolCallParser
from turnwise.types import Completion, Group, Media, Message, SamplingParams, Task, Trajectory, Turn


class ShownPrompt(NamedTuple):
    """The new part of the policy's input before a response, and the response's token limit."""

    turn_idx: int
    """Number of the turn, from 1."""
    added_ids: Sequence[int]
    """New token ids of the context; empty for a policy that takes text."""
    messages: Sequence[Message]
    """New messages; empty for a policy that takes tokens."""
    num_before: int
    """Number of the context's tokens before `added_ids`."""
    max_new_tokens: int


class Onlooker(Protocol):
    """Shows the events of an episode as they happen."""

    def prompt(self, prompt: ShownPrompt) -> None: ...

    def response(self, prompt: ShownPrompt, answer: Completion | TextAnswer) -> None: ...

    def outcome(self, turn_idx: int, turn: Turn) -> None:
        """Called after the agent has written the action, the reward and the metrics into turn `turn_idx` (from 1)."""
        ...


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode that has ended."""

    trajectory: Trajectory
    is_left: bool
    """Whether the player stopped the episode."""


@dataclass(slots=True)
class EpisodePrinter:
    """Opens the contexts of an episode, and shows an onlooker each prompt, response and outcome. The agent writes a turn's
    outcome after the response, so the outcome is shown when the next turn begins, or at the end."""

    onlooker: Onlooker
    _open: OpenConversation = field(init=False)
    _verify: Callable[[], None] = field(init=False, default=lambda: None)
    _conversations: list[Conversation] = field(init=False, default_factory=list)
    _num_shown: int = field(init=False, default=0)

    def over_tokens(
        self, server: Any, template: ChatTemplate, max_length: int, episode_id: str, parser: ToolCallParser | None = None
    ) -> None:
        """Makes the printer open contexts for a policy that samples tokens. `server` needs only `generate` and `release`."""
        observed: Any = _ObservedServer(server, self)
        contexts = TokenContexts(template, observed, max_length, episode_id, parser)
        self._open, self._verify = contexts, contexts.verify

    def over_text(self, complete: Complete) -> None:
        """Makes the printer open contexts for a policy that answers in text."""

        def opened(sampling: SamplingParams, tools: Tools = (), **options: Any) -> Any:
            async def observed(messages: Sequence[Message], sampling: SamplingParams, tools: Tools = ()) -> TextAnswer | None:
                prompt = self.ask((), messages[len(conversation.messages) :], 0, sampling.max_new_tokens)
                answer = await complete(messages, sampling, tools)
                if answer is not None:
                    self.onlooker.response(prompt, answer)
                return answer

            conversation = TextConversation(observed, sampling, tools)
            return conversation

        self._open = opened

    def __call__(self, sampling: SamplingParams, **options: Any) -> Conversation:
        conversation = self._open(sampling, **options)
        self._conversations.append(conversation)
        return conversation

    @property
    def turns(self) -> list[Turn]:
        return [turn for conversation in self._conversations for turn in conversation.turns]

    def ask(self, added_ids: Sequence[int], messages: Sequence[Message], num_before: int, max_new_tokens: int) -> ShownPrompt:
        """Shows the outcome of the previous turn, then the prompt of the next response. Returns that prompt."""
        self._show_outcomes()
        prompt = ShownPrompt(len(self.turns) + 1, added_ids, messages, num_before, max_new_tokens)
        self.onlooker.prompt(prompt)
        return prompt

    def end(self) -> None:
        """Shows the last outcome. Raises RolloutError if the tokens of the turns aren't those that the server saw."""
        self._show_outcomes()
        self._verify()

    def _show_outcomes(self) -> None:
        for index, turn in list(enumerate(self.turns))[self._num_shown :]:
            self.onlooker.outcome(index + 1, turn)
        self._num_shown = len(self.turns)


class _ObservedServer:
    """Passes requests on to a server, and shows each prompt and response to the printer's onlooker."""

    def __init__(self, server: Any, printer: EpisodePrinter) -> None:
        self._server = server
        self._printer = printer
        self._lengths: dict[str, int] = {}

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, request_id: str, media: Sequence[Media] = ()
    ) -> Completion:
        known = self._lengths.get(request_id, 0)
        prompt = self._printer.ask(prompt_ids[known:], (), known, sampling.max_new_tokens)
        completion: Completion = await self._server.generate(prompt_ids, sampling, request_id, media)
        self._lengths[request_id] = len(prompt_ids) + len(completion.token_ids)
        self._printer.onlooker.response(prompt, completion)
        return completion

    async def release(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)
        await self._server.release(request_id)


async def play_episode(
    agent: AgentLoop,
    task: Task,
    sampling: SamplingParams,
    printer: EpisodePrinter,
    score: Callable[[Group], Awaitable[Any]] | None = None,
) -> PlayedEpisode:
    """Plays a task, and scores the episode with `score`. An episode that the player stops is returned unscored, with the status
    `truncated`. A TurnwiseError of the agent is raised unchanged; any other exception of the agent becomes a RolloutError."""
    episode = agent.run(task, 0, printer, sibling_sampling(sampling, task, 0))
    [outcome] = await asyncio.gather(episode, return_exceptions=True)
    if isinstance(outcome, PlayStopped):
        printer.end()
        return PlayedEpisode(Trajectory(task=task, sibling=0, turns=printer.turns, status="truncated"), is_left=True)
    if isinstance(outcome, TurnwiseError):
        raise outcome
    if isinstance(outcome, BaseException):
        raise RolloutError(f"the episode ended with an exception\n{describe_error(outcome)}") from outcome
    printer.end()
    if score is not None:
        await score(Group(task, list(outcome)))
    return PlayedEpisode(outcome[0], is_left=False)
