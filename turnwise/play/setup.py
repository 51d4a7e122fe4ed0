"""Builds what `turnwise play` needs for one episode: its task, agent and limits, and the policy that
answers."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from turnwise.assemble.agents import build_agent, build_row_agent
from turnwise.assemble.gateway import RunGateway
from turnwise.assemble.placement import placed_rewards
from turnwise.assemble.rewards import build_reward_manager
from turnwise.assemble.rollouts import open_served_policy, parser_of, sampling_params
from turnwise.assemble.tasks import row_tasks
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.chat.trial import tried
from turnwise.config import AgenticConfig, require, unavailable_to_play
from turnwise.envs.players import actions_of
from turnwise.errors import ConfigError, DataError
from turnwise.examine.agents import agent_settings
from turnwise.examine.envs import env_factory
from turnwise.examine.examined import Examined
from turnwise.model_files.hub import local_path, looks_like_hub_name
from turnwise.models.load import load_tokenizer
from turnwise.play.episode import (
    Onlooker,
    OpenContexts,
    PlayedEpisode,
    TextContexts,
    play_episode,
    show_tokens,
)
from turnwise.play.policies import (
    OPENAI,
    PLAYERS,
    PlayerServer,
    Say,
    model_at,
    person,
    player,
    random_player,
    scripted_player,
)
from turnwise.protocols import AgentLoop, Env
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.spec import ROWS_TAG
from turnwise.types import Group, SamplingParams, Split, Task


@dataclass(frozen=True, slots=True)
class Choices:
    """The command-line options of one episode."""

    policy: str
    """One of `PLAYERS`, `openai:URL`, a model's folder, or its name on the hub."""
    split: Split = "train"
    seed: int = 0
    """Seed of the episode; if rows are played, the number of the row, from 0."""
    tokenizer: str | None = None
    """Folder or hub name of a player's tokenizer; None = the player answers in text. A model has its own."""
    actions: tuple[str, ...] = ()
    """Actions that the random player draws from; empty = as the environment offers."""
    model_name: str = ""
    """Name of the model at the URL."""
    read: Callable[[], str | None] = lambda: None
    """Reads a person's next line; returns None at the end of input."""
    show: Callable[[str], None] = lambda text: None
    """Shows a person a line."""


@dataclass(frozen=True, slots=True)
class PlayPolicy:
    """The policy of an episode, and the event loop that it runs on."""

    event_loop: WatchedRunner
    contexts: OpenContexts
    """Makes the contexts in which this policy answers."""
    close: Callable[[], None]
    tokenizer: PreTrainedTokenizerBase | None = None
    """None if the policy answers in text."""
    note: str = ""
    """A sentence for the user about this policy."""
    has_logprobs: bool = False
    is_patient: bool = False
    """Whether an episode has no time limit, because a person plays it."""
    set_env: Callable[[Env], None] = lambda env: None
    """Called with the environment before the first response."""


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """Everything that one episode needs."""

    task: Task
    policy: PlayPolicy
    agent: AgentLoop
    max_turns: int | None
    """Maximum responses; None = any number."""
    max_new_tokens: int
    """Maximum tokens per response."""
    mode: str
    """The context mode of the environment's agent; if a row is played, the name of the row's agent."""
    sampling: SamplingParams
    max_length: int
    """Maximum tokens of a context."""
    score: Callable[[Group], Awaitable[Any]] | None = None
    """Scores a row's group by `data.reward`; None if that is unset, or an environment is played."""

    def play(self, onlooker: Onlooker) -> PlayedEpisode:
        """Plays the episode before an onlooker; see `play_episode` for what is raised."""
        contexts = self.policy.contexts(onlooker)
        playing = play_episode(
            self.agent,
            self.task,
            self.sampling,
            contexts,
            onlooker,
            self.score,
        )
        return self.policy.event_loop.run(playing)

    def close(self) -> None:
        self.policy.close()


def set_up(examined: Examined, tag: str, choices: Choices) -> EpisodeSetup:
    """The setup of one episode of a tag. With the tag `ROWS_TAG`, the task is row `choices.seed` (from 0) of
    the split."""
    if tag == ROWS_TAG and choices.policy in PLAYERS and choices.policy != "human":
        raise ConfigError(
            f"--policy {choices.policy} chooses actions of an environment, and this config plays rows of "
            "data.train_files; play them yourself (human), or name a model or openai:URL"
        )
    task = _task(examined, tag, choices)
    with ExitStack() as on_error:
        policy = _policy(examined, task, choices)
        on_error.callback(policy.close)
        build = _of_environment if task.row is None else _of_row
        setup = build(examined, task, policy, sampling_params(examined.config, task.split))
        on_error.pop_all()
    return setup


def _task(examined: Examined, tag: str, choices: Choices) -> Task:
    if tag != ROWS_TAG:
        name = f"{choices.split}/{tag}/seed-{choices.seed}"
        return Task(
            id=name,
            tag=tag,
            split=choices.split,
            seed=choices.seed,
        )
    tasks = row_tasks(examined, choices.split)
    if not 0 <= choices.seed < len(tasks):
        raise DataError(
            f"data.{choices.split}_files: no row {choices.seed}; --seed takes 0 to {len(tasks) - 1}"
        )
    return tasks[choices.seed]


def _policy(examined: Examined, task: Task, choices: Choices) -> PlayPolicy:
    if choices.policy in PLAYERS:
        return _player_policy(examined, task, choices)
    if choices.policy.startswith(OPENAI):
        return _url_policy(examined, choices)
    return _model_policy(examined, task, choices)


def _of_row(
    examined: Examined,
    task: Task,
    policy: PlayPolicy,
    sampling: SamplingParams,
) -> EpisodeSetup:
    config = examined.config
    gateway = _gateway(config, policy)
    agent = build_row_agent(examined, task.split, task.agent, policy.event_loop, gateway)
    score = build_reward_manager(examined, placed_rewards(config), None, policy.event_loop)
    return EpisodeSetup(
        task=task,
        policy=policy,
        agent=agent,
        max_turns=config.agent.max_assistant_turns,
        max_new_tokens=config.max_new_tokens(task.split, ROWS_TAG),
        mode=task.agent,
        sampling=sampling,
        max_length=config.sequence_length,
        score=score,
    )


def _of_environment(
    examined: Examined, task: Task, policy: PlayPolicy, sampling: SamplingParams
) -> EpisodeSetup:
    config = examined.config
    settings = agent_settings(config, task.tag, task.split, policy.event_loop.watchdog)
    if policy.is_patient:
        settings = replace(settings, episode_timeout_s=None)
    make = env_factory(config, task.tag, task.split)

    def make_env(task: Task) -> Env:
        env = make(task)
        policy.set_env(env)
        return env

    agent = build_agent(
        examined,
        task.tag,
        task.split,
        make_env=make_env,
        settings=settings,
        gateway=_gateway(config, policy),
    )
    return EpisodeSetup(
        task=task,
        policy=policy,
        agent=agent,
        max_turns=settings.max_steps,
        max_new_tokens=settings.max_tokens_per_step,
        mode=settings.mode,
        sampling=sampling,
        max_length=config.sequence_length,
    )


def _gateway(config: AgenticConfig, policy: PlayPolicy) -> RunGateway | None:
    """What agents that speak HTTP talk to; it ends with the policy's event loop."""
    if not config.names_gateway:
        return None
    return RunGateway(config, policy.event_loop)


def _over_tokens(
    config: AgenticConfig,
    task: Task,
    server: Any,
    template: ChatTemplate,
) -> OpenContexts:
    """The `PlayPolicy.contexts` of a policy that samples tokens."""
    contexts = TokenContexts(
        template,
        server,
        config.sequence_length,
        task.id,
        parser_of(config, template),
    )
    return lambda onlooker: show_tokens(onlooker, contexts)


def _player_policy(examined: Examined, task: Task, choices: Choices) -> PlayPolicy:
    """A player, who answers in tokens if there is a tokenizer, else in text."""
    config = examined.config
    tokenizer = None
    template = None
    if choices.tokenizer:
        tokenizer = load_tokenizer(choices.tokenizer)
    pattern = None
    if task.row is None:
        pattern = config.custom_envs[task.tag].action_pattern
    if tokenizer:
        template = tried(ChatTemplate(tokenizer, template_kwargs=config.template_kwargs))
    server = PlayerServer(partial(_say, task, choices, pattern), template)
    if task.row is not None:
        server.choose_for(None)
    contexts: OpenContexts = partial(TextContexts, server.complete)
    note = ""
    if template is not None:
        contexts = _over_tokens(config, task, server, template)
    elif config.agent.has_tools:
        raise ConfigError(
            "--tokenizer: tool calls are read from tokens, and there is no tokenizer here; name one"
        )
    else:
        note = (
            "there is no tokenizer here, so texts are shown and no token limit applies; name one with "
            "--tokenizer DIR"
        )
    event_loop = WatchedRunner()
    return PlayPolicy(
        event_loop=event_loop,
        contexts=contexts,
        close=event_loop.close,
        tokenizer=tokenizer,
        note=note,
        is_patient=choices.policy == "human",
        set_env=server.choose_for,
    )


def _say(
    task: Task,
    choices: Choices,
    pattern: str | None,
    env: Env | None,
) -> Say:
    """The function that returns the player's responses. `env` is None if the task is a row."""
    if env is None:
        return person(choices.read, pattern)
    if choices.policy == "human":
        actions = actions_of(env, choices.actions)
        if actions:
            choices.show(f"actions: {', '.join(actions)}")
        return person(choices.read, pattern)
    if choices.policy == "random":
        return player(random_player(env, task.seed, choices.actions).act, pattern)
    return player(scripted_player(env).act, pattern)


def _url_policy(examined: Examined, choices: Choices) -> PlayPolicy:
    chat = model_at(choices.policy, choices.model_name, examined.config)
    event_loop = WatchedRunner()
    note = f"{chat.url} answers in text: there are no token ids to show, and nothing here could be trained on"
    return PlayPolicy(
        event_loop,
        partial(TextContexts, chat.complete),
        event_loop.close,
        note=note,
    )


def _model_policy(examined: Examined, task: Task, choices: Choices) -> PlayPolicy:
    if not local_path(choices.policy).is_dir() and not looks_like_hub_name(choices.policy):
        policies = ", ".join([*PLAYERS, f"{OPENAI}URL"])
        raise ConfigError(
            f"--policy {choices.policy!r} isn't one of {policies}, a model folder, or a name on the "
            "hub (ORG/NAME)"
        )
    config = examined.config
    require(unavailable_to_play(config, choices.split))
    served = open_served_policy(examined, choices.policy)
    contexts = _over_tokens(config, task, served.servers, served.template)
    return PlayPolicy(
        served.event_loop,
        contexts,
        served.close,
        served.tokenizer,
        has_logprobs=True,
    )
