"""Builds the setup of one episode from a config and a name: who answers, over which tokens, within which limits."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from turnwise.build.envs import agent_settings, build_agent, env_factory
from turnwise.build.placement import sampling_device
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
from turnwise.build.rollouts import open_served_policy, parser_of, sampling_params
from turnwise.build.rows import build_reward_stage, build_row_agent, row_task
from turnwise.chat.template import ChatTemplate
from turnwise.chat.trial import tried
from turnwise.config import AgenticConfig, require, unavailable_to_play
from turnwise.errors import ConfigError
from turnwise.hub import looks_like_hub_name
from turnwise.inference.openai_chat import OpenAIChat
from turnwise.models.load import load_tokenizer
from turnwise.models.tokenizer import MARKER_TOKENS, SPECIAL_TOKENS, train_tokenizer
from turnwise.protocols import AgentLoop, Env
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.spec import ROWS_TAG
from turnwise.types import Group, SamplingParams, Split, Task

BYTES_PER_TOKEN = 8
"""Factor of token limits if bytes stand in for tokens."""


@dataclass(frozen=True, slots=True)
class Choices:
    """An episode's options on the command line."""

    policy: str
    """One of `PLAYERS`, `openai:URL`, or a model's folder."""
    split: Split = "train"
    seed: int = 0
    """Seed of the episode; of a data set, the number of the row."""
    tokenizer: str | None = None
    """Folder of the tokenizer; None = the policy's own, if any."""
    actions: tuple[str, ...] = ()
    model_name: str | None = None
    read: Callable[[], str | None] = lambda: None
    """Reads a person's next line."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an episode may take."""

    max_turns: int | None
    max_new_tokens: int
    """Tokens of a response."""
    mode: str
    """The context mode of an environment's agent; of a row, the agent's name."""


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """Everything that one episode needs."""

    task: Task
    agent: AgentLoop
    limits: EpisodeLimits
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
    score: Callable[[Group], Awaitable[Any]] | None = None
    """Scores a row's group."""

    def play(self, printer: EpisodePrinter) -> PlayedEpisode:
        """Plays the episode; see `play_episode` for what is raised."""
        self.prepare(printer)
        return self.event_loop.run(play_episode(self.agent, self.task, self.sampling, printer, self.score))


def set_up(config: AgenticConfig, tag: str, choices: Choices) -> EpisodeSetup:
    """The setup of one episode of a tag. The tag of the rows (`ROWS_TAG`) plays the row whose number is the seed.

    Raises:
        TurnwiseError: a policy, model, tokenizer or row that isn't there.
    """
    if choices.policy in PLAYERS:
        return _of_player(config, tag, choices)
    return _of_url(config, tag, choices) if choices.policy.startswith(OPENAI) else _of_model(config, tag, choices)


def _task(config: AgenticConfig, tag: str, choices: Choices) -> Task:
    if tag == ROWS_TAG:
        return row_task(config, choices.split, choices.seed)
    return Task(id=f"{choices.split}/{tag}/seed-{choices.seed}", tag=tag, split=choices.split, seed=choices.seed)


@dataclass(frozen=True, slots=True)
class _TaskAgent:
    """The agent of a task, with what it may take and how it samples."""

    agent: AgentLoop
    limits: EpisodeLimits
    sampling: SamplingParams


def _of_task(
    config: AgenticConfig,
    task: Task,
    watchdog: Watchdog,
    bytes_per_token: int = 1,
    is_patient: bool = False,
    choose_for: Callable[[Env], None] = lambda env: None,
) -> _TaskAgent:
    """The agent of a task, with limits in tokens times `bytes_per_token`. A patient one has all the time; `choose_for` gets the
    environment before the first response."""
    sampling = sampling_params(config, task.split)
    sampling = replace(sampling, max_new_tokens=bytes_per_token * sampling.max_new_tokens)
    if task.row is not None:
        agent = build_row_agent(config, task.split, task.agent, watchdog, Stopwatch(), bytes_per_token)
        most = bytes_per_token * config.max_new_tokens(task.split, ROWS_TAG)
        return _TaskAgent(agent, EpisodeLimits(config.agent.max_assistant_turns, most, task.agent), sampling)
    settings = agent_settings(config, task.tag, task.split, watchdog)
    settings = replace(settings, max_tokens_per_step=bytes_per_token * settings.max_tokens_per_step)
    if is_patient:
        # A person may think for longer than an episode of training takes.
        settings = replace(settings, episode_timeout_s=None)
    make = env_factory(config, task.tag, task.split)

    def introduced(task: Task) -> Env:
        env = make(task)
        choose_for(env)
        return env

    agent = build_agent(config, task.tag, task.split, make_env=introduced, settings=settings)
    return _TaskAgent(agent, EpisodeLimits(settings.max_steps, settings.max_tokens_per_step, settings.mode), sampling)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of bytes and the few special tokens of a small model's chat template."""
    return train_tokenizer([], vocab_size=256 + len(SPECIAL_TOKENS) + len(MARKER_TOKENS))


def _of_player(config: AgenticConfig, tag: str, choices: Choices) -> EpisodeSetup:
    if tag == ROWS_TAG and choices.policy != "human":
        raise ConfigError(
            f"--policy {choices.policy} chooses actions of an environment, and this config plays rows of data.train_files; "
            "play them yourself (human), or name a model or openai:URL"
        )
    event_loop = WatchedRunner(Watchdog())
    task = _task(config, tag, choices)
    factor, note = 1, ""
    if choices.tokenizer is None:
        factor = BYTES_PER_TOKEN
        note = (
            f"there is no tokenizer here: bytes are counted as tokens, and limits in tokens are {BYTES_PER_TOKEN} times as "
            "high; --tokenizer DIR takes a real one"
        )
    tokenizer = load_tokenizer(choices.tokenizer) if choices.tokenizer else byte_tokenizer()
    template = tried(ChatTemplate(tokenizer, template_kwargs=config.template_kwargs if choices.tokenizer else {}))
    pattern = config.custom_envs[tag].action_pattern if task.row is None else None
    server = PlayerServer(partial(_player_of, task, choices, pattern), template)
    if task.row is not None:
        server.choose_for(None)
    found = _of_task(config, task, event_loop.watchdog, factor, choices.policy == "human", server.choose_for)
    max_length, parser = factor * config.sequence_length, parser_of(config, template)
    return EpisodeSetup(
        task,
        found.agent,
        found.limits,
        found.sampling,
        max_length,
        event_loop,
        prepare=lambda printer: printer.over_tokens(server, template, max_length, task.id, parser),
        close=event_loop.close,
        tokenizer=tokenizer,
        notes=(note,) if note else (),
        score=_score(config, task, tokenizer, event_loop.watchdog),
    )


def _score(
    config: AgenticConfig, task: Task, tokenizer: PreTrainedTokenizerBase | None, watchdog: Watchdog
) -> Callable[[Group], Awaitable[Any]] | None:
    """The rewards of the data set, for a row."""
    if task.row is None:
        return None
    return build_reward_stage(config, tokenizer, sampling_device(config), watchdog, Stopwatch())


def _player_of(task: Task, choices: Choices, pattern: str | None, env: Env | None) -> Say:
    if choices.policy == "human" or env is None:
        return person(choices.read, pattern)
    if choices.policy == "random":
        return player(random_player(env, task.seed, choices.actions).act, pattern)
    return player(scripted_player(env).act, pattern)


def _of_url(config: AgenticConfig, tag: str, choices: Choices) -> EpisodeSetup:
    if choices.model_name is None:
        raise ConfigError(f"{choices.policy} serves models by name: say which with --model-name NAME")
    url = choices.policy.removeprefix(OPENAI)
    chat = OpenAIChat(url, choices.model_name, os.environ.get("OPENAI_API_KEY", ""), config.deadlines.request_s)
    event_loop = WatchedRunner(Watchdog())
    task = _task(config, tag, choices)
    found = _of_task(config, task, event_loop.watchdog)
    return EpisodeSetup(
        task,
        found.agent,
        found.limits,
        found.sampling,
        config.sequence_length,
        event_loop,
        prepare=lambda printer: printer.over_text(chat.complete),
        close=event_loop.close,
        notes=(f"{chat.url} takes and gives text: there are no token ids to show, and nothing here could be trained on",),
        score=_score(config, task, None, event_loop.watchdog),
    )


def _of_model(config: AgenticConfig, tag: str, choices: Choices) -> EpisodeSetup:
    if not Path(choices.policy).is_dir() and not looks_like_hub_name(choices.policy):
        known: Sequence[str] = (*PLAYERS, f"{OPENAI}URL")
        raise ConfigError(
            f"--policy {choices.policy!r} isn't one of {', '.join(known)}, a model folder, or a name on the hub (ORG/NAME)"
        )
    require(unavailable_to_play(config, choices.split))
    task = _task(config, tag, choices)
    policy = open_served_policy(config, choices.policy)
    with ExitStack() as on_error:
        on_error.callback(policy.close)
        max_length, parser = config.sequence_length, parser_of(config, policy.template)
        found = _of_task(config, task, policy.watchdog)
        setup = EpisodeSetup(
            task,
            found.agent,
            found.limits,
            found.sampling,
            max_length,
            policy.event_loop,
            prepare=lambda printer: printer.over_tokens(policy.servers, policy.template, max_length, task.id, parser),
            close=policy.close,
            tokenizer=policy.tokenizer,
            has_logprobs=True,
            score=_score(config, task, policy.tokenizer, policy.watchdog),
        )
        on_error.pop_all()
    return setup
