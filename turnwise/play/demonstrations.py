"""Episodes of scripted players: demonstrations to learn from, and baselines to compare with. `EnvAgent` plays
them with the prompts and limits of training; the player answers in place of the model."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.chat.conversation import TextAnswer, TextConversation
from turnwise.chat.rendering import Tools
from turnwise.envs.parsing import ANSWERS, as_answer, parse_action
from turnwise.envs.players import Player
from turnwise.errors import ConfigError, RolloutError, TurnwiseError
from turnwise.protocols import Env, MakeEnv
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.replaceable import write_new_or_same
from turnwise.runtime.stacks import describe_error
from turnwise.types import Message, SamplingParams, Task, Trajectory

MakePlayer = Callable[[Any, Task], Player]
"""Makes a player for the environment of a task."""
_NUM_AHEAD = 16


class DemonstrationResult(NamedTuple):
    """How one episode ended. It is a success if its metric `success` is above ½ or, without this metric, its
    score above 0."""

    is_success: bool
    score: float


class Episode(NamedTuple):
    """One episode as a demonstration: the messages of each context with a response, and the last context's
    tools."""

    conversations: list[list[Message]]
    outcome: DemonstrationResult
    tools: Tools = ()


Converse = Callable[[Env | None, Task], Callable[[SamplingParams, Tools], TextConversation]]
"""Returns the function that opens the conversations of an episode. The environment is None for a row of a
data set."""


def demonstrations(
    make_env: MakeEnv,
    settings: EnvAgentSettings,
    make_player: MakePlayer,
    tasks: Iterable[Task],
) -> Iterator[list[Message]]:
    """Plays one episode per task and yields one list of messages per context: one per episode or, in mode
    `step`, one per turn. If the player gives up, the episode ends before that turn. A context without an
    answer is left out."""
    converse = scripted(make_player, settings.action_pattern)
    for episode in episodes(make_env, settings, converse, tasks):
        yield from episode.conversations


def play(
    make_env: MakeEnv,
    settings: EnvAgentSettings,
    make_player: MakePlayer,
    tasks: Iterable[Task],
) -> list[DemonstrationResult]:
    """Plays one episode per task, under the limits of `settings`, and returns how each ended."""
    converse = scripted(make_player, settings.action_pattern)
    return [episode.outcome for episode in episodes(make_env, settings, converse, tasks)]


def scripted(make_player: MakePlayer, action_pattern: str | None) -> Converse:
    """Returns a `Converse` that makes one player per episode, which answers in all conversations of the
    episode."""

    def converse(env: Env | None, task: Task) -> Callable[[SamplingParams, Tools], TextConversation]:
        player = make_player(env, task)

        async def complete(
            messages: Sequence[Message],
            sampling: SamplingParams,
            tools: Tools,
        ) -> TextAnswer | None:
            action = player.act()
            if action is None:
                return None
            return TextAnswer(_answer(action, action_pattern), "stop")

        return lambda sampling, tools: TextConversation(complete, sampling)

    return converse


def _answer(action: str, pattern: str | None) -> str:
    """A response from which `pattern` reads the action. Raises ConfigError if `as_answer` finds no such
    response."""
    text = as_answer(action, pattern)
    if text is None or parse_action(text, pattern) != action.strip():
        raise ConfigError(
            f"action_pattern {pattern!r} reads {action!r} in none of {', '.join(ANSWERS)}; change the pattern"
        )
    return text


def episodes(
    make_env: MakeEnv,
    settings: EnvAgentSettings,
    converse: Converse,
    tasks: Iterable[Task],
    num_at_once: int = 1,
) -> Iterator[Episode]:
    """Plays one episode per task, `num_at_once` at a time, and yields them in the order of the tasks."""
    calls = settings.calls
    with WatchedRunner(calls.watchdog, calls.place_timeout_s) as runner:
        play_one = partial(_episode, make_env, settings, converse)
        yield from played_by(runner, play_one, tasks, num_at_once)


def played_by(
    runner: WatchedRunner,
    play_one: Callable[[Task], Awaitable[Episode]],
    tasks: Iterable[Task],
    num_at_once: int,
) -> Iterator[Episode]:
    """Plays each task with `play_one`, `num_at_once` at a time, and yields the episodes in the order of the
    tasks. Each run of the event loop plays batches for 0.1 s, at most `_NUM_AHEAD` episodes (or `num_at_once`
    if more): a run per episode would cost a short one a fifth of its time. If an episode fails, yields the
    batches before it, then raises its error."""
    num_ahead = max(_NUM_AHEAD, num_at_once)
    remaining = iter(tasks)
    num_ahead = max(_NUM_AHEAD, num_at_once)
    waiting = list(islice(remaining, num_ahead))
    while waiting:
        played: list[Episode] = []
        try:
            runner.run(_play_some(play_one, waiting, num_at_once, played))
        except TurnwiseError:
            yield from played
            raise
        yield from played
        waiting += islice(remaining, num_ahead - len(waiting))


def write_jsonl(path: Path, demonstrations: Iterable[Sequence[Message]]) -> int:
    """Writes one `{"messages": [...]}` per line and returns the number of lines. Makes the folder if needed.
    Raises ConfigError if `path` is there already and holds anything else."""
    lines = []
    for messages in demonstrations:
        record = json.dumps({"messages": list(messages)}, ensure_ascii=False)
        lines.append(record + "\n")
    write_new_or_same(path, "".join(lines), "--out")
    return len(lines)


def outcome_of(trajectory: Trajectory) -> DemonstrationResult:
    success = trajectory.metrics.get("success", float(trajectory.score > 0))
    return DemonstrationResult(success > 0.5, trajectory.score)


async def _play_some(
    play_one: Callable[[Task], Awaitable[Episode]],
    waiting: list[Task],
    num_at_once: int,
    played: list[Episode],
) -> None:
    """Removes tasks from `waiting` and plays them, for about a tenth of a second. Appends the episodes to
    `played`."""
    end = time.monotonic() + 0.1
    while waiting and time.monotonic() < end:
        batch = waiting[:num_at_once]
        del waiting[:num_at_once]
        played += await _gathered(map(play_one, batch))


async def _gathered(playing: Iterable[Awaitable[Episode]]) -> Sequence[Episode]:
    """The episodes, once all have ended. Raises the first error: a TurnwiseError as it is, other Exceptions
    as RolloutError."""
    played = await asyncio.gather(*playing, return_exceptions=True)
    for fault in played:
        if isinstance(fault, Exception) and not isinstance(fault, TurnwiseError):
            raise RolloutError(f"the episode ended with an exception\n{describe_error(fault)}") from fault
        if isinstance(fault, BaseException):
            raise fault
    return [episode for episode in played if isinstance(episode, Episode)]


async def _episode(
    make_env: MakeEnv,
    settings: EnvAgentSettings,
    converse: Converse,
    task: Task,
) -> Episode:
    with settings.calls.limit(settings.tag, "the environment's constructor"):
        env = make_env(task)
    contexts = OpenedContexts(converse(env, task))
    sampling = SamplingParams(max_new_tokens=settings.max_tokens_per_step)
    [trajectory] = await EnvAgent(lambda _: env, settings).run(task, 0, contexts, sampling)
    return Episode(contexts.conversations, outcome_of(trajectory))


class OpenedContexts:
    """Opens the conversations of one episode, and remembers them."""

    def __init__(self, open_one: Callable[[SamplingParams, Tools], TextConversation]) -> None:
        self.tools: Tools = ()
        self._opened: list[TextConversation] = []
        self._open = open_one

    def __call__(
        self,
        sampling: SamplingParams,
        tools: Tools = (),
        **_: Any,
    ) -> TextConversation:
        self.tools = tools
        conversation = self._open(sampling, tools)
        self._opened.append(conversation)
        return conversation

    @property
    def conversations(self) -> list[list[Message]]:
        """The messages of each conversation that has a response."""
        return [conversation.messages for conversation in self._opened if conversation.messages]
