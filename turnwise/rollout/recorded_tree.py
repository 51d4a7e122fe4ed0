"""Replays the episode of an agent that sent its whole history with each request. No agent runs: its recorded
requests go into a tree again, in the order in which they were answered."""

from collections.abc import Callable, Sequence
from typing import Any

from turnwise.chat.contexts import opens_trees
from turnwise.chat.tree import Answer
from turnwise.errors import DataError, RequestError
from turnwise.rollout.player import EpisodeContexts
from turnwise.rollout.recorded import RecordedServer, difference
from turnwise.rollout.tasks import sibling_sampling
from turnwise.spec import MatchRule
from turnwise.types import CallOptions, Message, SamplingParams, Trajectory, Turn


async def replay_tree(
    trajectory: Trajectory,
    contexts: Callable[[Any, str], EpisodeContexts],
    sampling: SamplingParams,
    match: MatchRule,
) -> None:
    """Replays a trajectory whose contexts are parts of one episode. `contexts` takes a server and an
    episode's id, and returns the episode's contexts. Raises RolloutError at the first difference, DataError
    if the file has no messages, as older versions wrote none."""
    task = trajectory.task
    turns = trajectory.turns
    if not all(turn.messages for turn in turns):
        raise DataError(
            f"{task.id}, sibling {trajectory.sibling}: its turns have no `messages`, which older versions "
            "didn't write, so its requests aren't known and it can't be replayed"
        )
    server = RecordedServer(trajectory)
    opened = contexts(server, f"replay/{task.id}/{trajectory.sibling}")
    seeded_sampling = sibling_sampling(sampling, task, trajectory.sibling)
    tree = opens_trees(opened, "the replay").open_tree(seeded_sampling, match=match)
    parents = {turn.parent for turn in turns}
    answers: list[Answer] = []
    try:
        for number, turn in enumerate(turns):
            path = _path(turns, number)
            try:
                answer = await tree.answer(
                    _request(turns, answers, path), _options(turn), turns[path[0]].tools
                )
            except RequestError as fault:
                raise difference(trajectory, number, f"the request is refused: {fault}") from fault
            _compare(trajectory, number, answer, server)
            answers.append(answer)
            # An answer that no client got is matched after its twins. It isn't dropped: the next request like
            # its own would be answered by it again.
            if turn.is_trained or number in parents:
                tree.deliver(answer)
        tree.verify()
    finally:
        await opened.close()


def _path(turns: Sequence[Turn], number: int) -> list[int]:
    """The turns from the start of a turn's context to the turn itself."""
    path = [number]
    while (parent := turns[path[0]].parent) is not None:
        path.insert(0, parent)
    return path


def _request(turns: Sequence[Turn], answers: Sequence[Answer], path: Sequence[int]) -> list[Message]:
    """All messages before the response of the last turn of a path."""
    messages: list[Message] = []
    for number in path[:-1]:
        messages += turns[number].messages[:-1]
        messages.append(answers[number].message)
    messages += turns[path[-1]].messages[:-1]
    return messages


def _options(turn: Turn) -> CallOptions:
    if turn.sampling is None:
        return CallOptions()
    stop = turn.sampling.stop_strings
    return CallOptions(turn.sampling.max_new_tokens, turn.sampling.temperature, stop or None)


def _compare(trajectory: Trajectory, number: int, answer: Answer, server: RecordedServer) -> None:
    """Raises RolloutError if a request continues another turn than the recorded one did."""
    if server.newest != number:
        raise difference(trajectory, number, f"its prompt is that of turn {server.newest + 1}")
    recorded = trajectory.turns[number]
    if answer.turn.parent != recorded.parent:
        raise difference(
            trajectory,
            number,
            f"it continues {_name(answer.turn.parent)}, and the recorded one {_name(recorded.parent)}",
        )


def _name(parent: int | None) -> str:
    return "no turn" if parent is None else f"turn {parent + 1}"
