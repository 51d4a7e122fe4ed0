"""Tells an episode to its observer: live, around any agent, or from a finished trajectory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from turnwise.chat.contexts import opens_tokens, opens_trees
from turnwise.chat.message_content import Messages
from turnwise.chat.token_requests import TokenRequests
from turnwise.chat.tree import Answer, ConversationTree, OnCommit
from turnwise.protocols import (
    AgentLoop,
    Conversation,
    EpisodeObserver,
    HearsCalls,
    HearsUsers,
    OpenConversation,
    TurnPlace,
)
from turnwise.types import AS_OPENED, CallOptions, Message, SamplingParams, Task, Trajectory, Turn

Observe = Callable[[Task, int], EpisodeObserver | None]
"""Returns the observer of the next attempt at a task by a sibling; None if nobody observes it."""


@dataclass(frozen=True, slots=True)
class ObservedLoop:
    """Plays like `loop`, and tells the episodes to their observers."""

    loop: AgentLoop
    observe: Observe
    heard_loop: Callable[[EpisodeObserver], AgentLoop] | None = None
    """Makes the agent of one episode, whose environment is an `ObservedEnv`; None if no observer hears
    environments."""

    async def run(
        self,
        task: Task,
        sibling: int,
        open_conversation: OpenConversation,
        sampling: SamplingParams,
    ) -> list[Trajectory]:
        observer = self.observe(task, sibling)
        if observer is None:
            return await self.loop.run(task, sibling, open_conversation, sampling)
        loop = self.loop
        if self.heard_loop is not None:
            loop = self.heard_loop(observer)
        contexts = ObservedContexts(open_conversation, observer)
        with _Faults(observer):
            trajectories = await loop.run(task, sibling, contexts, sampling)
        contexts.tell_rewards()
        observer.ended(trajectories, None)
        return trajectories


@dataclass(frozen=True, slots=True)
class _Faults:
    """Tells the observer the exception that ends an episode, a cancellation too, and lets it pass."""

    observer: EpisodeObserver

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if fault is not None:
            self.observer.ended([], fault)


class ObservedContexts:
    """Opens an agent's contexts, and tells the observer what is asked and sampled in them. It also passes on
    calls of tools and answers of simulated users, to the observers of `open_conversation` too."""

    def __init__(self, open_conversation: OpenConversation, observer: EpisodeObserver) -> None:
        self.turns: list[Turn] = []
        """The turns of all contexts, in the order of sampling."""
        self._open = open_conversation
        self._outer = open_conversation
        self._observer = observer
        self._num_contexts = 0
        self._places: list[TurnPlace] = []
        self._num_rewarded = 0

    def __call__(self, sampling: SamplingParams, **options: Any) -> Conversation:
        conversation = _ObservedConversation(self._open(sampling, **options), self, self._num_contexts)
        self._num_contexts += 1
        return conversation

    def open_tree(
        self, sampling: SamplingParams, *, on_commit: OnCommit | None = None, **options: Any
    ) -> ConversationTree:
        """Opens a tree, and tells the observer each answer when it has been sampled. Each root is told as a
        context of its own; rewards are told at the end of the episode."""
        contexts: list[int] = []  # the context of each turn of the tree

        def observed(answer: Answer, messages: Messages) -> None:
            parent = answer.turn.parent
            if parent is None:
                contexts.append(self._num_contexts)
                self._num_contexts += 1
            else:
                contexts.append(contexts[parent])
            place = TurnPlace(len(self.turns), contexts[-1])
            self._observer.asked(place, messages)
            self._note(place, answer.turn, answer.message)
            if on_commit is not None:
                on_commit(answer, messages)

        trees = opens_trees(self._open, "the agent")
        return trees.open_tree(sampling, on_commit=observed, **options)

    def open_tokens(self, sampling: SamplingParams) -> TokenRequests:
        """Opens requests of token ids. Which of them become turns is only known at the end of the episode."""
        return opens_tokens(self._open, "the agent").open_tokens(sampling)

    def asked(self, context: int, messages: Sequence[Message]) -> None:
        self.tell_rewards()
        self._observer.asked(TurnPlace(len(self.turns), context), messages)

    def sampled(self, context: int, turn: Turn, reply: Message) -> None:
        self._note(TurnPlace(len(self.turns), context), turn, reply)

    def _note(self, place: TurnPlace, turn: Turn, reply: Message) -> None:
        self.turns.append(turn)
        self._places.append(place)
        self._observer.sampled(place, turn, reply)

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
        self._observer.called(
            name,
            arguments,
            result,
            seconds,
            is_error=is_error,
            waited_s=waited_s,
        )
        if isinstance(self._outer, HearsCalls):
            self._outer.called(
                name,
                arguments,
                result,
                seconds,
                is_error=is_error,
                waited_s=waited_s,
            )

    def replied(self, text: str, seconds: float) -> None:
        self._observer.replied(text, seconds)
        if isinstance(self._outer, HearsUsers):
            self._outer.replied(text, seconds)

    def tell_rewards(self) -> None:
        """Tells the rewards of the turns since the last call. The agent must have written them."""
        first = self._num_rewarded
        self._num_rewarded = len(self.turns)
        for number in range(first, self._num_rewarded):
            self._observer.rewarded(self._places[number], self.turns[number])


class _ObservedConversation:
    def __init__(
        self,
        conversation: Conversation,
        contexts: ObservedContexts,
        context: int,
    ) -> None:
        self.turns = conversation.turns
        self.close = conversation.close
        self.remaining_tokens = conversation.remaining_tokens
        self._conversation = conversation
        self._contexts = contexts
        self._context = context

    async def generate(
        self,
        new_messages: Sequence[Message],
        options: CallOptions = AS_OPENED,
    ) -> Message | None:
        self._contexts.asked(self._context, new_messages)
        reply = await self._conversation.generate(new_messages, options)
        if reply is not None:
            self._contexts.sampled(self._context, self.turns[-1], reply)
        return reply


def retold(trajectory: Trajectory, observer: EpisodeObserver) -> None:
    """Tells the observer a finished trajectory. A turn that was read from a file has no messages: its
    observation stands for them, as a user's."""
    context = -1
    for number, turn in enumerate(trajectory.turns):
        if turn.starts_context or number == 0:
            context += 1
        place = TurnPlace(number, context)
        messages = turn.messages or (
            {"role": "user", "content": turn.observation},
            {"role": "assistant", "content": turn.text},
        )
        observer.asked(place, messages[:-1])
        observer.sampled(place, turn, messages[-1])
        observer.rewarded(place, turn)
    observer.ended([trajectory], None)
