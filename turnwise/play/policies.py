"""The policies of `turnwise play` and `turnwise demos` that need no model here: people, scripted players,
models at URLs."""

import os
from collections.abc import Callable, Sequence

import numpy as np

from turnwise.chat.conversation import TextAnswer
from turnwise.chat.rendering import Tools
from turnwise.chat.template import ChatTemplate
from turnwise.config import AgenticConfig
from turnwise.envs.parsing import ANSWERS, as_answer
from turnwise.envs.players import ExpertPlayer, RandomPlayer
from turnwise.errors import ConfigError
from turnwise.inference.openai_chat import OpenAIChat
from turnwise.protocols import Env, HasExpert
from turnwise.types import Completion, Media, Message, SamplingParams, VersionRun, derive_seed

PLAYERS = ("human", "random", "scripted")
OPENAI = "openai:"
"""Prefix of a policy that is a model behind a URL; the URL follows the prefix. Such a model answers in
text."""
QUIT = "q"
"""The line by which a person ends an episode."""
VERBATIM = "!"
"""Prefix of a line that is the response as it stands."""


class PlayStopped(Exception):
    """The player has stopped the episode."""


Say = Callable[[], str]
"""Returns the next response of a player."""


def person(read: Callable[[], str | None], pattern: str | None) -> Say:
    """A function that returns a person's responses: each is the next line of `read`, wrapped so that
    `pattern` finds an action. A line for which no wrapping fits, and the text after a leading `!`, stay as
    they are. Empty lines are skipped. The function raises PlayStopped at the line `q`, or if `read` returns
    None (end of input)."""

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
    """A function that returns an automatic player's responses: the actions of `choose`, wrapped for `pattern`
    to find them."""

    def say() -> str:
        action = choose()
        text = as_answer(action, pattern)
        if text is None:
            raise ConfigError(
                f"action_pattern {pattern!r} reads {action!r} in none of {', '.join(ANSWERS)}; play it "
                "yourself"
            )
        return text

    return say


def random_player(env: Env, seed: int, actions: Sequence[str]) -> RandomPlayer:
    """A player that draws from `actions`, or else as the environment offers. Raises ConfigError if there is
    nothing to draw from."""
    player = RandomPlayer(env, derive_seed(seed, "random player"), actions)
    if not player.draw:
        raise ConfigError(
            f"{type(env).__name__} has neither `random_action` nor `actions` to draw from: name "
            "actions with --actions a,b,c"
        )
    return player


def scripted_player(env: Env, actions: Sequence[str] = ()) -> ExpertPlayer:
    """A player that follows the environment's own expert. Raises ConfigError if the environment has none."""
    if not isinstance(env, HasExpert):
        raise ConfigError(
            f"{type(env).__name__} has no expert_action(), so nobody plays it by script; choose another "
            "--policy"
        )
    return ExpertPlayer(env, actions)


def model_at(policy: str, model_name: str, config: AgenticConfig) -> OpenAIChat:
    """The model at the URL of the policy `openai:URL`. Requests carry the key from the environment's
    OPENAI_API_KEY, if set."""
    url = policy.removeprefix(OPENAI)
    key = os.environ.get("OPENAI_API_KEY", "")
    return OpenAIChat(url, model_name, key, config.deadlines.request_s)


class PlayerServer:
    """Answers with a player's responses. `generate` returns the tokens that a model would sample for a
    response, at log-prob 0 and cut at `max_new_tokens`; this needs a template. `complete` returns the text.
    `choose` makes an environment's player."""

    def __init__(self, choose: Callable[[Env | None], Say], template: ChatTemplate | None) -> None:
        self._choose = choose
        self._template = template
        self._say: Say | None = None

    def choose_for(self, env: Env | None) -> None:
        """Makes the player for the episode's environment, which is None if the task is a row of a data
        set."""
        self._say = self._choose(env)

    async def complete(
        self, messages: Sequence[Message], sampling: SamplingParams, tools: Tools = ()
    ) -> TextAnswer:
        assert self._say is not None, "an agent makes its environment before it asks for a response"
        return TextAnswer(self._say(), "stop")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
    ) -> Completion:
        assert self._say is not None and self._template is not None
        token_ids = self._template.respond(self._say())[: sampling.max_new_tokens]
        num_tokens = len(token_ids)
        is_stopped = num_tokens > 0 and token_ids[-1] in sampling.stop_token_ids
        versions: tuple[VersionRun, ...] = ()
        if num_tokens:
            versions = (VersionRun(0, num_tokens),)
        return Completion(
            token_ids=np.array(token_ids, np.int64),
            logprobs=np.zeros(num_tokens, np.float32),
            finish_reason="stop" if is_stopped else "length",
            versions=versions,
        )

    async def release(self, request_id: str) -> None:
        """Does nothing: a player has no cache to free."""
