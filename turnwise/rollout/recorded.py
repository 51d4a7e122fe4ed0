"""Replays a recorded trajectory: agent, environment and template run again, with the recorded tokens and
results of tools."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from turnwise.chat.ledger import EMPTY, Prefix, Prompt
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
    """Answers with the responses of a trajectory's turns, in order. It has only the methods of `PolicyServer`
    that a conversation calls. `generate` raises RolloutError if the prompt isn't the recorded context, or if
    no turn is left. In the second case it raises RecordEnd if the end of the episode wasn't recorded
    (`is_whole` is False)."""

    def __init__(self, trajectory: Trajectory, is_whole: bool = True) -> None:
        self._trajectory = trajectory
        self._is_whole = is_whole
        self._prefixes: list[Prefix] = []  # of each answered turn
        self.num_turns = 0
        """Number of turns answered so far."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
    ) -> Completion:
        number = self.num_turns
        turns = self._trajectory.turns
        if number == len(turns):
            if not self._is_whole:
                raise RecordEnd
            raise difference(
                self._trajectory,
                number,
                "the loop asks for another turn, and the record has none",
            )
        turn = turns[number]
        new_ids = array("q", turn.prompt_ids.tolist())
        prompt = Prompt(self._prefix_of(turn, number), new_ids)
        expected_ids = np.array(prompt.token_ids(), np.int64)
        self._check(number, expected_ids, np.asarray(prompt_ids, np.int64))
        self._prefixes.append(prompt.answered(turn.response_ids.tolist()))
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

    def _prefix_of(self, turn: Turn, number: int) -> Prefix:
        if turn.starts_context or number == 0:
            return EMPTY
        parent = number - 1 if turn.parent is None else turn.parent
        return self._prefixes[parent]

    def _check(self, number: int, expected: IntArray, got: IntArray) -> None:
        """Raises RolloutError unless the prompt of turn `number` is the recorded one."""
        if np.array_equal(expected, got):
            return
        length = min(len(expected), len(got))
        is_different = expected[:length] != got[:length]
        differing = np.flatnonzero(is_different).tolist()
        position = differing[0] if differing else length
        shown = []
        for ids in (expected, got):
            excerpt = ids[position : position + 5].tolist()
            shown.append(f"{excerpt}… of {len(ids)} ids")
        raise difference(
            self._trajectory,
            number,
            f"position {position}: expected {shown[0]}, got {shown[1]}",
        )


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
        results = self._recorded[self._server.num_turns - 1].tool_results
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

    def open_recorded(sampling: SamplingParams, **options: Any) -> Conversation:
        return _RecordedConversation(opened(sampling, **options), server, trajectory.turns)

    try:
        with Foreign(f"the agent of {task.id}", are_faults=True):
            played = await agents(task).run(task, trajectory.sibling, open_recorded, seeded_sampling)
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
