"""Episodes of scripted players: demonstrations to learn from, and baselines to compare with.

They are played by `EnvAgent` itself over a conversation whose responses come from the player, so that prompts and limits
are those of training by construction.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """A Conversation in which a player answers: text without tokens, and room for everything."""

    def __init__(self, player: Player, answer_template: str, action_pattern: str | None) -> None:
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._player = player
        self._template = answer_template
        self._pattern = action_pattern

    async def generate(self, new_messages: Sequence[Message], max_new_tokens: int | None = None) -> Message:
        action = self._player.act()
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

    def remaining_tokens(self) -> int:
        return 2**31


def demonstrations(
    make_env: MakeEnv,
    settings: EnvAgentSettings,
    make_player: MakePlayer,
    tasks: Iterable[Task],
    answer_template: str = ANSWER_TEMPLATE,
) -> Iterator[list[Message]]:
    """The messages of one episode a task, from its first prompt to the player's last answer.

    Raises:
        ConfigError: `settings.action_pattern` can't read what `answer_template` writes.
    """
    for conversation, _ in _episodes(make_env, settings, make_player, tasks, answer_template):
        yield conversation.messages


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
    return [
        Outcome(is_success=trajectory.metrics.get("success", trajectory.score) > 0, score=trajectory.score)
        for _, trajectory in episodes
    ]


def write_jsonl(path: Path, demonstrations: Iterable[Sequence[Message]]) -> int:
    """Writes one `{"messages": [...]}` a line and returns how many; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for messages in demonstrations:
            file.write(json.dumps({"messages": list(messages)}, ensure_ascii=False) + "\n")
            count += 1
    return count


def _episodes(
    make_env: MakeEnv, settings: EnvAgentSettings, make_player: MakePlayer, tasks: Iterable[Task], answer_template: str
) -> Iterator[tuple[PlayerConversation, Trajectory]]:
    sampling = SamplingParams(max_new_tokens=settings.max_tokens_per_step)
    with asyncio.Runner() as runner:
        for task in tasks:
            env = make_env(task)
            conversation = PlayerConversation(make_player(env, task), answer_template, settings.action_pattern)
            agent = EnvAgent(_always(env), settings)
            [trajectory] = runner.run(agent.run(task, 0, _always(conversation), sampling))
            yield conversation, trajectory


def _always(value: Any) -> Callable[..., Any]:
    """A factory that returns what exists already."""
    return lambda *_, **__: value
