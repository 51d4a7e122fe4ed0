"""From a config and a name to the stage of one episode: who answers, over which tokens, within which limits."""

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
    Say,
    Speaker,
    SpeakerServer,
    person,
    player,
    random_player,
    scripted_player,
)
from turnwise.build.rollouts import build_policy, choose_device, sampling_params
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
"""By which limits in tokens grow where bytes stand in for them."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a command line says of an episode."""

    policy: str
    """One of `PLAYERS`, `openai:URL`, or a model's folder."""
    split: Split = "train"
    seed: int = 0
    tokenizer: str | None = None
    """Folder; None where there is none but the policy's own."""
    actions: tuple[str, ...] = ()
    model_name: str | None = None
    read: Callable[[], str | None] = lambda: None
    """A person's next line."""


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """All that one episode needs."""

    config: AgenticConfig
    task: Task
    settings: EnvAgentSettings
    sampling: SamplingParams
    tokenizer: PreTrainedTokenizerBase | None
    """None where the policy is known by its words only."""
    max_length: int
    notes: tuple[str, ...]
    has_logprobs: bool
    event_loop: WatchedRunner
    prepare: Callable[[EpisodePrinter], None]
    """Opens the policy's contexts for the printer of the episode."""
    choose_for: Callable[[Env], None]
    close: Callable[[], None]

    def play(self, printer: EpisodePrinter) -> PlayedEpisode:
        """Plays the episode; see `play_episode` for what is raised."""
        self.prepare(printer)
        episode = play_episode(self.config, self.task, self.settings, self.sampling, printer, self.choose_for)
        return self.event_loop.run(episode)


def set_stage(config: AgenticConfig, tag: str, choices: Choices) -> EpisodeSetup:
    """The stage of one episode of a tag.

    Raises:
        TurnwiseError: a policy, model or tokenizer that isn't there.
    """
    task = Task(id=f"{choices.split}/{tag}/seed-{choices.seed}", tag=tag, split=choices.split, seed=choices.seed)
    if choices.policy in PLAYERS:
        return _of_player(config, task, choices)
    if choices.policy.startswith(OPENAI):
        return _of_url(config, task, choices)
    return _of_model(config, task, choices)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of bytes and the few special tokens of a small model's chat template."""
    return train_tokenizer([], vocab_size=256 + len(SPECIAL_TOKENS) + len(MARKER_TOKENS))


def _of_player(config: AgenticConfig, task: Task, choices: Choices) -> EpisodeSetup:
    watchdog = Watchdog()
    settings, sampling = agent_settings(config, task.tag, task.split, watchdog), sampling_params(config, task.split)
    tokenizer, max_length, notes = _tokens(choices.tokenizer), config.sequence_length, []
    if choices.tokenizer is None:
        max_length *= BYTES_PER_TOKEN
        settings = replace(settings, max_tokens_per_step=BYTES_PER_TOKEN * settings.max_tokens_per_step)
        sampling = replace(sampling, max_new_tokens=BYTES_PER_TOKEN * sampling.max_new_tokens)
        notes.append(
            f"no tokenizer is here: bytes stand in for tokens, limits in tokens are {BYTES_PER_TOKEN} times as high; "
            "--tokenizer DIR takes a real one"
        )
    if choices.policy == "human":
        # A person may think for longer than an episode of training takes.
        settings = replace(settings, episode_timeout_s=None)
    template = tried(ChatTemplate(tokenizer, template_kwargs=config.template_kwargs if choices.tokenizer else {}))
    speaker = Speaker(partial(_speaker_of, task, choices, settings.action_pattern))
    event_loop = WatchedRunner(watchdog)
    return EpisodeSetup(
        config=config,
        task=task,
        settings=settings,
        sampling=sampling,
        tokenizer=tokenizer,
        max_length=max_length,
        notes=tuple(notes),
        has_logprobs=False,
        event_loop=event_loop,
        prepare=lambda printer: printer.over_tokens(SpeakerServer(speaker.speak, template), template, max_length, task.id),
        choose_for=speaker.choose_for,
        close=event_loop.close,
    )


def _speaker_of(task: Task, choices: Choices, pattern: str | None, env: Env) -> Say:
    if choices.policy == "human":
        return person(choices.read, pattern)
    if choices.policy == "random":
        return player(random_player(env, task.seed, choices.actions), pattern)
    return player(scripted_player(env), pattern)


def _tokens(folder: str | None) -> PreTrainedTokenizerBase:
    return byte_tokenizer() if folder is None else load_tokenizer(folder)


def _of_url(config: AgenticConfig, task: Task, choices: Choices) -> EpisodeSetup:
    if choices.model_name is None:
        raise ConfigError(f"{choices.policy} serves models by name: say which with --model-name NAME")
    url = choices.policy.removeprefix(OPENAI)
    chat = OpenAIChat(url, choices.model_name, os.environ.get("OPENAI_API_KEY", ""), config.deadlines.request_s)
    watchdog = Watchdog()
    event_loop = WatchedRunner(watchdog)
    return EpisodeSetup(
        config=config,
        task=task,
        settings=agent_settings(config, task.tag, task.split, watchdog),
        sampling=sampling_params(config, task.split),
        tokenizer=None,
        max_length=config.sequence_length,
        notes=(f"{chat.url} takes and gives text: there are no token ids to show, and nothing here could be trained on",),
        has_logprobs=False,
        event_loop=event_loop,
        prepare=lambda printer: printer.over_text(chat.complete),
        choose_for=_nobody,
        close=event_loop.close,
    )


def _of_model(config: AgenticConfig, task: Task, choices: Choices) -> EpisodeSetup:
    if not Path(choices.policy).is_dir() and not looks_like_hub_name(choices.policy):
        known: Sequence[str] = (*PLAYERS, f"{OPENAI}URL")
        raise ConfigError(
            f"--policy {choices.policy!r} is none of {', '.join(known)}, no model folder, and no name on the hub, ORG/NAME"
        )
    require(unavailable_to_play(config, task.split))
    policy = build_policy(config, choose_device(config), is_trained=False, model_path=choices.policy)
    max_length = config.sequence_length
    return EpisodeSetup(
        config=config,
        task=task,
        settings=agent_settings(config, task.tag, task.split, policy.watchdog),
        sampling=sampling_params(config, task.split),
        tokenizer=policy.tokenizer,
        max_length=max_length,
        notes=(),
        has_logprobs=True,
        event_loop=policy.event_loop,
        prepare=lambda printer: printer.over_tokens(policy.servers, policy.template, max_length, task.id),
        choose_for=_nobody,
        close=policy.close,
    )


def _nobody(env: Env) -> None:
    """A model knows of its environment what it is told."""
