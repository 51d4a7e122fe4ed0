"""Builds the setup of one episode from a config and a name: who answers, over which tokens, within which limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from turnwise.agents.env_agent import EnvAgentSettings
from turnwise.build.envs import agent_settings
from turnwise.build.play import EpisodePrinter, PlayedEpisode, play_episode
from turnwise.build.play_policies import (
    OPENAI,
    PLAYERS,
    PlayerServer,
    Say,
    person,
    player,
    random_player,
    scripted_player,
)
from turnwise.build.rollouts import open_served_policy, sampling_params
from turnwise.chat.template import ChatTemplate
from turnwise.chat.trial import tried
from turnwise.config import AgenticConfig, require, unavailable_to_play
from turnwise.errors import ConfigError
from turnwise.hub import looks_like_hub_name
from turnwise.inference.openai_chat import OpenAIChat
from turnwise.models.load import load_tokenizer
from turnwise.models.tokenizer import MARKER_TOKENS, SPECIAL_TOKENS, train_tokenizer
from turnwise.protocols import Env
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import SamplingParams, Split, Task

BYTES_PER_TOKEN = 8
"""Factor of token limits if bytes stand in for tokens."""


@dataclass(frozen=True, slots=True)
class Choices:
    """An episode's options on the command line."""

    policy: str
    """One of `PLAYERS`, `openai:URL`, or a model's folder."""
    split: Split = "train"
    seed: int = 0
    tokenizer: str | None = None
    """Folder of the tokenizer; None = the policy's own, if any."""
    actions: tuple[str, ...] = ()
    model_name: str | None = None
    read: Callable[[], str | None] = lambda: None
    """Reads a person's next line."""


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """Everything that one episode needs."""

    config: AgenticConfig
    task: Task
    settings: EnvAgentSettings
    sampling: SamplingParams
    max_length: int
    event_loop: WatchedRunner
    prepare: Callable[[EpisodePrinter], None]
    """Opens the policy's contexts for the printer of the episode."""
    close: Callable[[], None]
    tokenizer: PreTrainedTokenizerBase | None = None
    """None if the policy answers in text."""
    notes: tuple[str, ...] = ()
    has_logprobs: bool = False
    choose_for: Callable[[Env], None] = lambda env: None
    """Gives the policy its environment; a model knows only what its prompt says."""

    def play(self, printer: EpisodePrinter) -> PlayedEpisode:
        """Plays the episode; see `play_episode` for what is raised."""
        self.prepare(printer)
        episode = play_episode(self.config, self.task, self.settings, self.sampling, printer, self.choose_for)
        return self.event_loop.run(episode)


def set_up(config: AgenticConfig, tag: str, choices: Choices) -> EpisodeSetup:
    """The setup of one episode of a tag.

    Raises:
        TurnwiseError: a policy, model or tokenizer that isn't there.
    """
    task = Task(id=f"{choices.split}/{tag}/seed-{choices.seed}", tag=tag, split=choices.split, seed=choices.seed)
    if choices.policy in PLAYERS:
        return _of_player(config, task, choices)
    return _of_url(config, task, choices) if choices.policy.startswith(OPENAI) else _of_model(config, task, choices)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of bytes and the few special tokens of a small model's chat template."""
    return train_tokenizer([], vocab_size=256 + len(SPECIAL_TOKENS) + len(MARKER_TOKENS))


def _of_player(config: AgenticConfig, task: Task, choices: Choices) -> EpisodeSetup:
    event_loop = WatchedRunner(Watchdog())
    settings, sampling = agent_settings(config, task.tag, task.split, event_loop.watchdog), sampling_params(config, task.split)
    max_length, note = config.sequence_length, ""
    if choices.tokenizer is None:
        max_length *= BYTES_PER_TOKEN
        settings = replace(settings, max_tokens_per_step=BYTES_PER_TOKEN * settings.max_tokens_per_step)
        sampling = replace(sampling, max_new_tokens=BYTES_PER_TOKEN * sampling.max_new_tokens)
        note = (
            f"there is no tokenizer here: bytes are counted as tokens, and limits in tokens are {BYTES_PER_TOKEN} times as "
            "high; --tokenizer DIR takes a real one"
        )
    if choices.policy == "human":
        # A person may think for longer than an episode of training takes.
        settings = replace(settings, episode_timeout_s=None)
    tokenizer = load_tokenizer(choices.tokenizer) if choices.tokenizer else byte_tokenizer()
    template = tried(ChatTemplate(tokenizer, template_kwargs=config.template_kwargs if choices.tokenizer else {}))
    server = PlayerServer(partial(_player_of, task, choices, settings.action_pattern), template)
    return EpisodeSetup(
        config,
        task,
        settings,
        sampling,
        max_length,
        event_loop,
        prepare=lambda printer: printer.over_tokens(server, template, max_length, task.id),
        close=event_loop.close,
        tokenizer=tokenizer,
        notes=(note,) if note else (),
        choose_for=server.choose_for,
    )


def _player_of(task: Task, choices: Choices, pattern: str | None, env: Env) -> Say:
    if choices.policy == "human":
        return person(choices.read, pattern)
    if choices.policy == "random":
        return player(random_player(env, task.seed, choices.actions), pattern)
    return player(scripted_player(env), pattern)


def _of_url(config: AgenticConfig, task: Task, choices: Choices) -> EpisodeSetup:
    if choices.model_name is None:
        raise ConfigError(f"{choices.policy} serves models by name: say which with --model-name NAME")
    url = choices.policy.removeprefix(OPENAI)
    chat = OpenAIChat(url, choices.model_name, os.environ.get("OPENAI_API_KEY", ""), config.deadlines.request_s)
    event_loop = WatchedRunner(Watchdog())
    return EpisodeSetup(
        config,
        task,
        agent_settings(config, task.tag, task.split, event_loop.watchdog),
        sampling_params(config, task.split),
        config.sequence_length,
        event_loop,
        prepare=lambda printer: printer.over_text(chat.complete),
        close=event_loop.close,
        notes=(f"{chat.url} takes and gives text: there are no token ids to show, and nothing here could be trained on",),
    )


def _of_model(config: AgenticConfig, task: Task, choices: Choices) -> EpisodeSetup:
    if not Path(choices.policy).is_dir() and not looks_like_hub_name(choices.policy):
        known: Sequence[str] = (*PLAYERS, f"{OPENAI}URL")
        raise ConfigError(
            f"--policy {choices.policy!r} isn't one of {', '.join(known)}, a model folder, or a name on the hub (ORG/NAME)"
        )
    require(unavailable_to_play(config, task.split))
    policy = open_served_policy(config, choices.policy)
    max_length = config.sequence_length
    return EpisodeSetup(
        config,
        task,
        agent_settings(config, task.tag, task.split, policy.watchdog),
        sampling_params(config, task.split),
        max_length,
        policy.event_loop,
        prepare=lambda printer: printer.over_tokens(policy.servers, policy.template, max_length, task.id),
        close=policy.close,
        tokenizer=policy.tokenizer,
        has_logprobs=True,
    )
