"""Episodes of scripted players: demonstrations to learn from, and baselines to compare with.

They are played by `EnvAgent` itself over a conversation whose responses come from the player, so that prompts and limits
are those of training by construction.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.envs.parsing import parse_action
from turnwise.envs.players import Player
from turnwise.errors import ConfigError
from turnwise.protocols import Env
from turnwise.types import Message, SamplingParams, Task, Trajectory, Turn

ANSWER_TEMPLATE = "<answer>{action}</answer>"

MakeEnv = Callable[[Task], Env]
MakePlayer = Callable[[Any, Task], Player]
"""A player for the environment of a task; one that draws derives its seed from the task's."""


class Outcome(NamedTuple):
    """How one episode ended: `is_success` is the environment's metric `success`, or a positive score without one."""

    is_success: bool
    score: float


class PlayerConversation:
    """A Conversation in which a player answers: text without tokens, and room for everything. One may answer in several."""

    def __init__(self, player: Player, answer_template: str, action_pattern: str | None) -> None:
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._player = player
        self._template = answer_template
        self._pattern = action_pattern

    async def generate(self, new_messages: Sequence[Message], max_new_tokens: int | None = None) -> Message | None:
        action = self._player.act()
        if action is None:
            return None
        text = self._template.replace("{action}", action)
        if parse_action(text, self._pattern) != action:
            raise ConfigError(
                f"the answer {text!r} isn't read as {action!r} by action_pattern {self._pattern!r}; "
                f"make answer_template {self._template!r} and the pattern agree"
            )
        reply = {"role": "assistant", "content": text}
        self.messages += [*new_messages, reply]
        no_ids = np.zeros(0, np.int64)
        self.turns.append(Turn(prompt_ids=no_ids, response_ids=no_ids, logprobs=np.zeros(0, np.float32), text=text))
        return reply

    async def close(self) -> None:
        return None

    def remaining_tokens(self) -> int:
        return 2**31


def demonstrations(
    make_env: MakeEnv,
    settings: EnvAgentSettings,
    make_player: MakePlayer,
    tasks: Iterable[Task],
    answer_template: str = ANSWER_TEMPLATE,
) -> Iterator[list[Message]]:
    """The messages of one episode a task, from its first prompt to the player's last answer; in mode `step` each turn's alone.

    Where the player gives up the episode ends before that turn; one that gives up at once has none.

    Raises:
        ConfigError: `settings.action_pattern` can't read what `answer_template` writes.
    """
    for contexts, _ in _episodes(make_env, settings, make_player, tasks, answer_template):
        yield from (conversation.messages for conversation in contexts if conversation.messages)


def play(
    make_env: MakeEnv,
    settings: EnvAgentSettings,
    make_player: MakePlayer,
    tasks: Iterable[Task],
    answer_template: str = ANSWER_TEMPLATE,
) -> list[Outcome]:
    """How one episode a task ends for a player, under the limits of `settings`.

    Raises:
        ConfigError: `settings.action_pattern` can't read what `answer_template` writes.
    """
    episodes = _episodes(make_env, settings, make_player, tasks, answer_template)
    return [_outcome(trajectory) for _, trajectory in episodes]


def write_jsonl(path: Path, demonstrations: Iterable[Sequence[Message]]) -> int:
    """Writes one `{"messages": [...]}` a line and returns how many; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for messages in demonstrations:
            file.write(json.dumps({"messages": list(messages)}, ensure_ascii=False) + "\n")
            count += 1
    return count


def _outcome(trajectory: Trajectory) -> Outcome:
    return Outcome(is_success=trajectory.metrics.get("success", trajectory.score) > 0, score=trajectory.score)


def _episodes(
    make_env: MakeEnv, settings: EnvAgentSettings, make_player: MakePlayer, tasks: Iterable[Task], answer_template: str
) -> Iterator[tuple[list[PlayerConversation], Trajectory]]:
    sampling = SamplingParams(max_new_tokens=settings.max_tokens_per_step)
    with asyncio.Runner() as runner:
        for task in tasks:
            env = make_env(task)
            contexts = _Contexts(make_player(env, task), answer_template, settings.action_pattern)
            agent = EnvAgent(partial(_existing, env), settings)
            [trajectory] = runner.run(agent.run(task, 0, contexts, sampling))
            yield contexts.opened, trajectory


class _Contexts:
    """Opens the conversations of one episode, all with one player."""

    def __init__(self, player: Player, answer_template: str, action_pattern: str | None) -> None:
        self.opened: list[PlayerConversation] = []
        self._arguments = (player, answer_template, action_pattern)

    def __call__(self, *_: Any, **__: Any) -> PlayerConversation:
        self.opened.append(PlayerConversation(*self._arguments))
        return self.opened[-1]


def _existing(env: Env, task: Task) -> Env:
    return env
