"""Replays a recorded trajectory: agent, environment and template run again, with the recorded tokens and
results of tools."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from turnwise.chat.contexts import opens_tokens, opens_trees
from turnwise.chat.ledger import EMPTY, Prefix, Prompt
from turnwise.chat.token_requests import TokenRequests
from turnwise.chat.tree import ConversationTree
from turnwise.errors import EnvironmentFault, RolloutError
from turnwise.protocols import AgentLoop, Conversation
from turnwise.rollout.player import EpisodeContexts
from turnwise.rollout.tasks import sibling_sampling
from turnwise.runtime.foreign import Foreign
from turnwise.types import (
    AS_OPENED,
    CallOptions,
    Completion,
    IntArray,
    Media,
    Message,
    SamplingParams,
    Task,
    Trajectory,
    Turn,
)


class RecordEnd(RolloutError):
    """The agent asks for a turn after the last recorded one, in an episode whose end isn't recorded."""


class RecordedServer:
    """Answers with the responses of a trajectory's turns. A prompt gets the first unused turn whose context
    has its ids, in whatever order prompts come. It has only the methods of `PolicyServer` that a conversation
    calls. `generate` raises RolloutError if no unused turn has this context, or if no turn is left. In the
    second case it raises RecordEnd if the end of the episode wasn't recorded (`is_whole` is False)."""

    def __init__(self, trajectory: Trajectory, is_whole: bool = True) -> None:
        self._trajectory = trajectory
        self._is_whole = is_whole
        self._prefixes: list[Prefix] = []
        self._unused: dict[bytes, list[int]] = {}  # ids of a prompt → the turns that answer it
        for number, turn in enumerate(trajectory.turns):
            prompt = self._prompt(turn, number)
            self._prefixes.append(prompt.answered(turn.response_ids.tolist()))
            self._unused.setdefault(_digest(prompt.token_ids()), []).append(number)
        self.newest = -1
        """Index of the turn that was answered last."""
        self.num_turns = 0
        """Number of turns answered so far."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
    ) -> Completion:
        turns = self._trajectory.turns
        if self.num_turns == len(turns):
            if not self._is_whole:
                raise RecordEnd
            raise difference(
                self._trajectory,
                self.num_turns,
                "the loop asks for another turn, and the record has none",
            )
        twins = self._unused.get(_digest(array("q", prompt_ids)))
        if not twins:
            raise self._difference(np.asarray(prompt_ids, np.int64))
        self.newest = twins.pop(0)
        turn = turns[self.newest]
        self.num_turns += 1
        return Completion(
            turn.response_ids,
            turn.logprobs,
            turn.finish_reason,
            turn.versions,
            0.0,
            turn.kept_ids,
            turn.kept_offsets,
        )

    async def release(self, request_id: str) -> None: ...

    def _prompt(self, turn: Turn, number: int) -> Prompt:
        prefix = EMPTY
        if number > 0 and not turn.starts_context:
            parent = number - 1 if turn.parent is None else turn.parent
            prefix = self._prefixes[parent]
        return Prompt(prefix, array("q", turn.prompt_ids.tolist()))

    def _difference(self, got: IntArray) -> RolloutError:
        """The error for a prompt that isn't recorded: how it differs from that of the first unused turn."""
        number = min(twins[0] for twins in self._unused.values() if twins)
        turn = self._trajectory.turns[number]
        expected = np.array(self._prompt(turn, number).token_ids(), np.int64)
        length = min(len(expected), len(got))
        is_different = expected[:length] != got[:length]
        differing = np.flatnonzero(is_different).tolist()
        position = differing[0] if differing else length
        shown = []
        for ids in (expected, got):
            excerpt = ids[position : position + 5].tolist()
            shown.append(f"{excerpt}… of {len(ids)} ids")
        return difference(
            self._trajectory,
            number,
            f"position {position}: expected {shown[0]}, got {shown[1]}",
        )


def _digest(token_ids: "array[int]") -> bytes:
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16).digest()


class _RecordedContexts:
    """Opens the contexts of a replayed episode."""

    def __init__(self, opened: EpisodeContexts, server: RecordedServer, recorded: list[Turn]) -> None:
        self._opened = opened
        self._server = server
        self._recorded = recorded

    def __call__(self, sampling: SamplingParams, **options: Any) -> Conversation:
        return _RecordedConversation(self._opened(sampling, **options), self._server, self._recorded)

    def open_tree(self, sampling: SamplingParams, **options: Any) -> ConversationTree:
        return opens_trees(self._opened, "the agent").open_tree(sampling, **options)

    def open_tokens(self, sampling: SamplingParams) -> TokenRequests:
        return opens_tokens(self._opened, "the agent").open_tokens(sampling)


class _RecordedConversation:
    """Wraps a conversation over a `RecordedServer`, and adds the recorded results of tool calls to its
    replies."""

    def __init__(
        self,
        conversation: Conversation,
        server: RecordedServer,
        recorded: list[Turn],
    ) -> None:
        self.turns = conversation.turns
        self.close = conversation.close
        self.remaining_tokens = conversation.remaining_tokens
        self._conversation = conversation
        self._server = server
        self._recorded = recorded

    async def generate(
        self,
        new_messages: Sequence[Message],
        options: CallOptions = AS_OPENED,
    ) -> Message | None:
        reply = await self._conversation.generate(new_messages, options)
        if reply is None:
            return None
        results = self._recorded[self._server.newest].tool_results
        if results is not None:
            reply["tool_results"] = results
        return reply


async def replay(
    trajectory: Trajectory,
    agents: Callable[[Task], AgentLoop],
    contexts: Callable[[Any, str], EpisodeContexts],
    sampling: SamplingParams,
    is_whole: bool = True,
) -> str:
    """Plays a trajectory again with its agent. `contexts` takes a server and an episode's id, and returns the
    episode's contexts. Raises RolloutError at the first difference, EnvironmentFault if the agent fails. If
    `is_whole` is False, only the beginning of the episode was recorded, without what an agent notes after
    sampling (observations, actions, rewards, outcome); then a failure after the last recorded turn isn't
    raised but returned as text. In all other cases, returns ""."""
    task = trajectory.task
    server = RecordedServer(trajectory, is_whole)
    opened = contexts(server, f"replay/{task.id}/{trajectory.sibling}")
    seeded_sampling = sibling_sampling(sampling, task, trajectory.sibling)

    open_recorded = _RecordedContexts(opened, server, trajectory.turns)
    try:
        with Foreign(f"the agent of {task.id}", are_faults=True):
            played = await agents(task).run(
                task,
                trajectory.sibling,
                open_recorded,
                seeded_sampling,
            )
    except RecordEnd:
        return ""
    except EnvironmentFault as fault:
        if is_whole or server.num_turns < len(trajectory.turns):
            raise
        return f"{task.id}, sibling {trajectory.sibling}, after the last turn of the record: {fault}"
    finally:
        await opened.close()
    _compare(trajectory, played, is_whole)
    return ""


def _compare(
    trajectory: Trajectory,
    played: Sequence[Trajectory],
    is_whole: bool,
) -> None:
    """Raises RolloutError if the played episode is shorter than the recorded one or, if all was recorded, if
    what the agent noted differs."""
    turns = [turn for part in played for turn in part.turns]
    for number, turn in enumerate(trajectory.turns):
        if number == len(turns):
            raise difference(trajectory, number, "the loop ended before it, and the record continues")
        if is_whole:
            _compare_turns(trajectory, number, turn, turns[number])
    if is_whole and played[0].status != trajectory.status:
        raise difference(
            trajectory,
            len(turns) - 1,
            f"status: expected {trajectory.status}, got {played[0].status}",
        )


def _compare_turns(
    trajectory: Trajectory,
    number: int,
    recorded: Turn,
    played: Turn,
) -> None:
    for name in ("observation", "action", "reward"):
        expected = getattr(recorded, name)
        got = getattr(played, name)
        if expected != got:
            raise difference(trajectory, number, f"{name}: expected {expected!r}, got {got!r}")


def difference(trajectory: Trajectory, number: int, details: str) -> RolloutError:
    """The error for a difference in turn `number` (from 0)."""
    return RolloutError(
        f"the replay differs from the record: {trajectory.task.id}, sibling {trajectory.sibling}, turn "
        f"{number + 1}, {details}"
    )
