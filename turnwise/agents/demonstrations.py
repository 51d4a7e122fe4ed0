"""Episodes of scripted players: demonstrations to learn from, and baselines to compare with. `EnvAgent` plays them, and the
player answers in place of the model. So prompts and limits are the same as in training."""

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
from turnwise.protocols import Env
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.stacks import describe_error
from turnwise.types import Message, SamplingParams, Task, Trajectory

MakeEnv = Callable[[Task], Env]
MakePlayer = Callable[[Any, Task], Player]
"""Makes a player for the environment of a task; a random player derives its seed from the task's."""
_NUM_AHEAD = 16


class DemonstrationResult(NamedTuple):
    """How one episode ended. `is_success`: whether the metric `success` (or the score, without that metric) is positive."""

    is_success: bool
    score: float


class Episode(NamedTuple):
    """One episode as a demonstration: the messages of each context that has an answer, and the tools offered there."""

    conversations: list[list[Message]]
    outcome: DemonstrationResult
    tools: Tools = ()


Converse = Callable[[Env | None, Task], Callable[[SamplingParams, Tools], TextConversation]]
"""Opens the conversations of a task's episode, and so decides who answers. The environment is None for a row of a data set."""


def _player_conversation(
    player: Player, answer_template: str | None, action_pattern: str | None, sampling: SamplingParams
) -> TextConversation:
    """A conversation in which a player answers. One player may answer in several conversations. If `answer_template` is None,
    an action is written in the first form that `action_pattern` reads."""

    async def complete(messages: Sequence[Message], sampling: SamplingParams, tools: Tools) -> TextAnswer | None:
        action = player.act()
        if action is None:
            return None
        text = as_answer(action, action_pattern) if answer_template is None else answer_template.replace("{action}", action)
        if text is None or parse_action(text, action_pattern) != action.strip():
            template = " or ".join(ANSWERS) if answer_template is None else answer_template
            raise ConfigError(
                f"the answer {text or action!r} isn't read as {action!r} by action_pattern {action_pattern!r}; "
                f"make answer_template {template!r} and the pattern agree"
            )
        return TextAnswer(text, "stop")

    return TextConversation(complete, sampling)


def demonstrations(
    make_env: MakeEnv,
    settings: EnvAgentSettings,
    make_player: MakePlayer,
    tasks: Iterable[Task],
    answer_template: str | None = None,
) -> Iterator[list[Message]]:
    """Yields the messages of one episode per task, from the first prompt to the player's last answer; in mode `step`, those of
    each turn. If the player gives up, the episode ends before that turn. If it gives up at once, nothing is yielded."""
    converse = scripted(make_player, settings.action_pattern, answer_template)
    for episode in episodes(make_env, settings, converse, tasks):
        yield from episode.conversations


def play(
    make_env: MakeEnv,
    settings: EnvAgentSettings,
    make_player: MakePlayer,
    tasks: Iterable[Task],
    answer_template: str | None = None,
) -> list[DemonstrationResult]:
    """Plays one episode per task, under the limits of `settings`, and says how each ended."""
    converse = scripted(make_player, settings.action_pattern, answer_template)
    return [episode.outcome for episode in episodes(make_env, settings, converse, tasks)]


def scripted(make_player: MakePlayer, action_pattern: str | None, answer_template: str | None = None) -> Converse:
    """A function that opens conversations in which a player answers."""

    def converse(env: Env | None, task: Task) -> Callable[[SamplingParams, Tools], TextConversation]:
        player = make_player(env, task)
        return lambda sampling, tools: _player_conversation(player, answer_template, action_pattern, sampling)

    return converse


def episodes(
    make_env: MakeEnv, settings: EnvAgentSettings, converse: Converse, tasks: Iterable[Task], num_at_once: int = 1
) -> Iterator[Episode]:
    """One episode per task, in the order of the tasks, `num_at_once` at a time."""
    calls = settings.calls
    with WatchedRunner(calls.watchdog, calls.place_timeout_s) as runner:
        yield from played_by(runner, partial(_episode, make_env, settings, converse), tasks, num_at_once)


def played_by(
    runner: WatchedRunner, play_one: Callable[[Task], Awaitable[Episode]], tasks: Iterable[Task], num_at_once: int
) -> Iterator[Episode]:
    """The episode that `play_one` plays for each task, in the order of the tasks; `num_at_once` are played at the same time. Up
    to `_NUM_AHEAD` short ones are played before the first is yielded: a start of the event loop costs a fifth of one."""
    remaining = iter(tasks)
    waiting: list[Task] = []
    while waiting := waiting + list(islice(remaining, max(_NUM_AHEAD, num_at_once) - len(waiting))):
        played: list[Episode] = []
        try:
            runner.run(_play_some(play_one, waiting, num_at_once, played))
        except TurnwiseError:
            yield from played
            raise
        yield from played


def write_jsonl(path: Path, demonstrations: Iterable[Sequence[Message]]) -> int:
    """Writes one `{"messages": [...]}` per line, makes the folder if needed, and returns the number of lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for messages in demonstrations:
            file.write(json.dumps({"messages": list(messages)}, ensure_ascii=False) + "\n")
            count += 1
    return count


def outcome_of(trajectory: Trajectory) -> DemonstrationResult:
    """How the episode ended."""
    return DemonstrationResult(is_success=trajectory.metrics.get("success", trajectory.score) > 0, score=trajectory.score)


async def _play_some(
    play_one: Callable[[Task], Awaitable[Episode]], waiting: list[Task], num_at_once: int, played: list[Episode]
) -> None:
    """Moves episodes from `waiting` to `played` until a tenth of a second is over."""
    end = time.monotonic() + 0.1
    while waiting and time.monotonic() < end:
        some, waiting[:num_at_once] = waiting[:num_at_once], []
        played += await _gathered(map(play_one, some))


async def _gathered(playing: Iterable[Awaitable[Episode]]) -> Sequence[Episode]:
    played = await asyncio.gather(*playing, return_exceptions=True)
    for fault in played:
        if isinstance(fault, Exception) and not isinstance(fault, TurnwiseError):
            raise RolloutError(f"the episode ended with an exception\n{describe_error(fault)}") from fault
        if isinstance(fault, BaseException):
            raise fault
    return [episode for episode in played if isinstance(episode, Episode)]


async def _episode(make_env: MakeEnv, settings: EnvAgentSettings, converse: Converse, task: Task) -> Episode:
    with settings.calls.limit(settings.tag, "the environment's constructor"):
        env = make_env(task)
    contexts = OpenedContexts(converse(env, task))
    sampling = SamplingParams(max_new_tokens=settings.max_tokens_per_step)
    [trajectory] = await EnvAgent(lambda _: env, settings).run(task, 0, contexts, sampling)
    return Episode(contexts.said, outcome_of(trajectory))


class OpenedContexts:
    """Opens the conversations of one episode."""

    def __init__(self, open_one: Callable[[SamplingParams, Tools], TextConversation]) -> None:
        self.tools: Tools = ()
        self._opened: list[TextConversation] = []
        self._open = open_one

    def __call__(self, sampling: SamplingParams, tools: Tools = (), **_: Any) -> TextConversation:
        self.tools = tools
        self._opened.append(self._open(sampling, tools))
        return self._opened[-1]

    @property
    def said(self) -> list[list[Message]]:
        """The messages of each conversation that has an answer."""
        return [conversation.messages for conversation in self._opened if conversation.messages]
