"""The policies of `turnwise play` that aren't models: people and scripted players. Their words become tokens."""

from collections.abc import Callable, Sequence

import numpy as np

from turnwise.chat.conversation import TextAnswer
from turnwise.chat.rendering import Tools
from turnwise.chat.template import ChatTemplate
from turnwise.envs.parsing import ANSWERS, as_answer
from turnwise.envs.players import ExpertPlayer, RandomPlayer
from turnwise.errors import ConfigError
from turnwise.protocols import Env, HasExpert
from turnwise.types import Completion, Media, Message, SamplingParams, VersionRun, derive_seed

PLAYERS = ("human", "random", "scripted")
OPENAI = "openai:"
"""Prefix of the URL of a model that answers in text."""
QUIT, VERBATIM = "q", "!"


class PlayStopped(Exception):
    """The player has stopped the episode."""


Say = Callable[[], str]
"""Gives the whole next response."""


def person(read: Callable[[], str | None], pattern: str | None) -> Say:
    """A function that reads a person's next line and returns it as a response, written so that `pattern` reads the action.
    Empty lines are skipped. What follows a leading `!`, or a line that fits no form of an action, is returned as it is. Raises
    PlayStopped at `q`, or if `read` returns None (end of input)."""

    def say() -> str:
        while True:
            line = read()
            if line is None or line.strip() == QUIT:
                raise PlayStopped
            if line.startswith(VERBATIM):
                return line.removeprefix(VERBATIM)
            if line.strip():
                return as_answer(line.strip(), pattern) or line

    return say


def player(choose: Callable[[], str], pattern: str | None) -> Say:
    """A function that returns a player's next action as a response, written so that `pattern` reads the action."""

    def say() -> str:
        action = choose()
        text = as_answer(action, pattern)
        if text is None:
            raise ConfigError(f"action_pattern {pattern!r} reads {action!r} in none of {', '.join(ANSWERS)}; play it yourself")
        return text

    return say


def random_player(env: Env, seed: int, actions: Sequence[str]) -> RandomPlayer:
    """A player that draws from `actions`, or from the environment's own if `actions` is empty."""
    player = RandomPlayer(env, derive_seed(seed, "random player"), actions)
    if not player.actions:
        raise ConfigError(f"{type(env).__name__} has no `actions` to draw from: name them with --actions a,b,c")
    return player


def scripted_player(env: Env, actions: Sequence[str] = ()) -> ExpertPlayer:
    """A player that follows the environment's own expert."""
    if not isinstance(env, HasExpert):
        raise ConfigError(f"{type(env).__name__} has no expert_action(), so nobody plays it by script; choose another --policy")
    return ExpertPlayer(env, actions)


class PlayerServer:
    """Turns a player's words into the tokens that a model would sample, with log-prob 0. `choose` gives the player of an
    environment. Like any server it cuts what exceeds the token budget. Without a template it answers in text alone."""

    def __init__(self, choose: Callable[[Env | None], Say], template: ChatTemplate | None) -> None:
        self._choose = choose
        self._template = template
        self._say: Say | None = None

    def choose_for(self, env: Env | None) -> None:
        """Chooses the player for the episode's environment; None for a row of a data set."""
        self._say = self._choose(env)

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams, tools: Tools = ()) -> TextAnswer:
        assert self._say is not None, "an agent makes its environment before it asks for a response"
        return TextAnswer(self._say(), "stop")

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, request_id: str, media: Sequence[Media] = ()
    ) -> Completion:
        assert self._say is not None and self._template is not None
        token_ids = self._template.respond(self._say())[: sampling.max_new_tokens]
        is_stopped = bool(token_ids) and token_ids[-1] in sampling.stop_token_ids
        return Completion(
            token_ids=np.array(token_ids, np.int64),
            logprobs=np.zeros(len(token_ids), np.float32),
            finish_reason="stop" if is_stopped else "length",
            versions=(VersionRun(0, len(token_ids)),) if token_ids else (),
        )

    async def release(self, request_id: str) -> None:
        """Does nothing, since a player keeps nothing."""
