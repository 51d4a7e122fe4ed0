"""Builds the setup of one episode from a config and a tag: who answers, over which tokens, within which limits."""

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
from turnwise.build.play_policies import OPENAI, PLAYERS, PlayerServer, Say, person, player, random_player, scripted_player
from turnwise.build.rollouts import open_served_policy, parser_of, sampling_params
from turnwise.build.rows import build_reward_stage, build_row_agent, row_tasks
from turnwise.chat.template import ChatTemplate
from turnwise.chat.trial import tried
from turnwise.config import AgenticConfig, require, unavailable_to_play
from turnwise.errors import ConfigError, DataError
from turnwise.hub import looks_like_hub_name
from turnwise.inference.openai_chat import OpenAIChat
from turnwise.models.load import load_tokenizer
from turnwise.protocols import AgentLoop, Env
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.spec import ROWS_TAG
from turnwise.types import Group, SamplingParams, Split, Task


@dataclass(frozen=True, slots=True)
class Choices:
    """An episode's options on the command line."""

    policy: str
    """One of `PLAYERS`, `openai:URL`, or a model's folder."""
    split: Split = "train"
    seed: int = 0
    """Seed of the episode, or row number in a data set."""
    tokenizer: str | None = None
    """Folder of the tokenizer; None = the policy's own, if any."""
    actions: tuple[str, ...] = ()
    model_name: str | None = None
    read: Callable[[], str | None] = lambda: None
    """Reads a person's next line."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits of an episode."""

    max_turns: int | None
    max_new_tokens: int
    """Maximum tokens per response."""
    mode: str
    """An environment agent's context mode, or a row's agent name."""


@dataclass(frozen=True, slots=True)
class Voice:
    """The policy of an episode, and the event loop that it runs on."""

    event_loop: WatchedRunner
    prepare: Callable[[EpisodePrinter], None]
    """Makes the episode's printer open contexts of this policy."""
    close: Callable[[], None]
    tokenizer: PreTrainedTokenizerBase | None = None
    """None if the policy answers in text."""
    note: str = ""
    has_logprobs: bool = False
    is_patient: bool = False
    """Whether an episode has no time limit, because a person plays it."""
    meet: Callable[[Env], None] = lambda env: None
    """Called with the environment before the first response."""


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """Everything that one episode needs."""

    task: Task
    voice: Voice
    agent: AgentLoop
    limits: EpisodeLimits
    sampling: SamplingParams
    max_length: int
    score: Callable[[Group], Awaitable[Any]] | None = None
    """Scores a row's group."""

    def play(self, printer: EpisodePrinter) -> PlayedEpisode:
        """Plays the episode; see `play_episode` for what is raised."""
        self.voice.prepare(printer)
        return self.voice.event_loop.run(play_episode(self.agent, self.task, self.sampling, printer, self.score))

    def close(self) -> None:
        self.voice.close()


def set_up(config: AgenticConfig, tag: str, choices: Choices) -> EpisodeSetup:
    """The setup of one episode of a tag. For rows of a data set (tag `ROWS_TAG`), the seed is the row's number."""
    of_player, of_url = choices.policy in PLAYERS, choices.policy.startswith(OPENAI)
    make = _player_voice if of_player else _url_voice if of_url else _model_voice
    if of_player and tag == ROWS_TAG and choices.policy != "human":
        raise ConfigError(
            f"--policy {choices.policy} chooses actions of an environment, and this config plays rows of data.train_files; "
            "play them yourself (human), or name a model or openai:URL"
        )
    task = Task(id=f"{choices.split}/{tag}/seed-{choices.seed}", tag=tag, split=choices.split, seed=choices.seed)
    if tag == ROWS_TAG:
        tasks = row_tasks(config, choices.split)
        if not 0 <= choices.seed < len(tasks):
            raise DataError(f"data.{choices.split}_files: no row {choices.seed}; --seed takes 0 to {len(tasks) - 1}")
        task = tasks[choices.seed]
    with ExitStack() as on_error:
        voice = make(config, task, choices)
        on_error.callback(voice.close)
        agent, limits = _agent(config, task, voice)
        watchdog, score = voice.event_loop.watchdog, None
        if task.row is not None:
            score = build_reward_stage(config, voice.tokenizer, sampling_device(config), watchdog, Stopwatch())
        on_error.pop_all()
    return EpisodeSetup(task, voice, agent, limits, sampling_params(config, task.split), config.sequence_length, score)


def _agent(config: AgenticConfig, task: Task, voice: Voice) -> tuple[AgentLoop, EpisodeLimits]:
    watchdog = voice.event_loop.watchdog
    if task.row is not None:
        agent = build_row_agent(config, task.split, task.agent, watchdog, Stopwatch())
        most = config.max_new_tokens(task.split, ROWS_TAG)
        return agent, EpisodeLimits(config.agent.max_assistant_turns, most, task.agent)
    settings = agent_settings(config, task.tag, task.split, watchdog)
    if voice.is_patient:
        settings = replace(settings, episode_timeout_s=None)
    make = env_factory(config, task.tag, task.split)

    def introduced(task: Task) -> Env:
        env = make(task)
        voice.meet(env)
        return env

    agent = build_agent(config, task.tag, task.split, make_env=introduced, settings=settings)
    return agent, EpisodeLimits(settings.max_steps, settings.max_tokens_per_step, settings.mode)


def _player_voice(config: AgenticConfig, task: Task, choices: Choices) -> Voice:
    """A player, whose words become tokens if there is a tokenizer."""
    tokenizer = load_tokenizer(choices.tokenizer) if choices.tokenizer else None
    pattern = config.custom_envs[task.tag].action_pattern if task.row is None else None
    template = tried(ChatTemplate(tokenizer, template_kwargs=config.template_kwargs)) if tokenizer else None
    server = PlayerServer(partial(_say, task, choices, pattern), template)
    event_loop, note, is_patient = WatchedRunner(Watchdog()), "", choices.policy == "human"
    if task.row is not None:
        server.choose_for(None)
    if template is None:
        note = "there is no tokenizer here, so texts are shown and no token limit applies; name one with --tokenizer DIR"
        if config.agent.tool_config_path or config.agent.function_tool_path:
            raise ConfigError("--tokenizer: tool calls are read from tokens, and there is no tokenizer here; name one")

    def prepare(printer: EpisodePrinter) -> None:
        if template is None:
            return printer.over_text(server.complete)
        printer.over_tokens(server, template, config.sequence_length, task.id, parser_of(config, template))

    return Voice(event_loop, prepare, event_loop.close, tokenizer, note, False, is_patient, server.choose_for)


def _say(task: Task, choices: Choices, pattern: str | None, env: Env | None) -> Say:
    """The function that gives the next response of a player, in an environment or for a row."""
    if choices.policy == "human" or env is None:
        return person(choices.read, pattern)
    draws = choices.policy == "random"
    return player((random_player(env, task.seed, choices.actions) if draws else scripted_player(env)).act, pattern)


def _url_voice(config: AgenticConfig, task: Task, choices: Choices) -> Voice:
    if choices.model_name is None:
        raise ConfigError(f"{choices.policy} serves models by name: say which with --model-name NAME")
    url = choices.policy.removeprefix(OPENAI)
    chat = OpenAIChat(url, choices.model_name, os.environ.get("OPENAI_API_KEY", ""), config.deadlines.request_s)
    event_loop = WatchedRunner(Watchdog())
    note = f"{chat.url} answers in text: there are no token ids to show, and nothing here could be trained on"
    return Voice(event_loop, lambda printer: printer.over_text(chat.complete), event_loop.close, note=note)


def _model_voice(config: AgenticConfig, task: Task, choices: Choices) -> Voice:
    if not Path(choices.policy).is_dir() and not looks_like_hub_name(choices.policy):
        known: Sequence[str] = (*PLAYERS, f"{OPENAI}URL")
        raise ConfigError(
            f"--policy {choices.policy!r} isn't one of {', '.join(known)}, a model folder, or a name on the hub (ORG/NAME)"
        )
    require(unavailable_to_play(config, choices.split))
    policy = open_served_policy(config, choices.policy)
    template = policy.template

    def prepare(printer: EpisodePrinter) -> None:
        printer.over_tokens(policy.servers, template, config.sequence_length, task.id, parser_of(config, template))

    return Voice(policy.event_loop, prepare, policy.close, policy.tokenizer, has_logprobs=True)
