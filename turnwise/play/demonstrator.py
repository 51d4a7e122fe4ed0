"""Plays demonstrations in a config's environments or on its rows, with a player that needs no model on this
machine."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnwise.agents.env_agent import EnvAgentSettings
from turnwise.assemble.agents import build_row_agent
from turnwise.assemble.placement import placed_rewards
from turnwise.assemble.rewards import build_reward_manager
from turnwise.assemble.rollouts import sampling_params
from turnwise.assemble.tasks import row_tasks
from turnwise.chat.conversation import TextConversation
from turnwise.chat.rendering import Tools
from turnwise.config import AgenticConfig
from turnwise.envs.players import Acting, ErringPlayer, Player
from turnwise.errors import ConfigError, RolloutError
from turnwise.examine.agents import agent_settings
from turnwise.examine.envs import env_factory
from turnwise.examine.examined import Examined
from turnwise.play.demonstrations import (
    Converse,
    Episode,
    MakePlayer,
    OpenedContexts,
    episodes,
    outcome_of,
    played_by,
    scripted,
)
from turnwise.play.policies import OPENAI, model_at, random_player, scripted_player
from turnwise.protocols import Env
from turnwise.rollout.tasks import SeededTasks, sibling_sampling
from turnwise.runtime.entry_points import load_class
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.spec import ROWS_TAG
from turnwise.tools.tool_box import readable
from turnwise.types import Group, Message, SamplingParams, Split, Task, derive_seed

DEMONSTRATORS = ("expert", "random", "erring")
NUM_AT_ONCE = 16
"""Maximum episodes that are played at the same time if a model behind a URL answers."""


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """The player of demonstrations, and its options."""

    policy: str
    """One of `DEMONSTRATORS`, a class `module:Class` that is called with `(env, seed)`, or `openai:URL`."""
    error_rate: float = 0.5
    """Share of actions that the erring player draws at random."""
    actions: tuple[str, ...] = ()
    """Actions that the random and the erring player draw from; empty = as the environment offers."""
    model_name: str = ""
    """Name of the model at the URL."""


def demonstrate(
    examined: Examined,
    tag: str,
    demonstrator: Demonstrator,
    num_episodes: int,
    split: Split = "train",
) -> Iterator[Episode]:
    """Plays the first `num_episodes` tasks of a tag in a split, and yields the episodes in order. With the
    tag `ROWS_TAG`, the tasks are the split's first rows, and a model at a URL answers them. Raises
    ConfigError if the policy can't play the tag."""
    if tag == ROWS_TAG:
        yield from _of_rows(examined, demonstrator, num_episodes, split)
        return
    config = examined.config
    settings = agent_settings(config, tag, split)
    if demonstrator.policy.startswith(OPENAI):
        converse = _converse_with_model(config, demonstrator, split)
        num_at_once = NUM_AT_ONCE
    else:
        converse = _scripted(demonstrator, settings)
        num_at_once = 1
    yield from episodes(
        env_factory(config, tag, split),
        settings,
        converse,
        tasks_of_tag(config, tag, num_episodes, split),
        num_at_once,
    )


def tasks_of_tag(
    config: AgenticConfig,
    tag: str,
    num_tasks: int,
    split: Split,
) -> list[Task]:
    """The first `num_tasks` tasks of an environment's tag. A run plays the same tasks if its split has only
    this tag."""
    manager = config.env_manager(split)
    shares = dict(zip(manager.tags, manager.num_groups_partition, strict=True))
    source = SeededTasks(config.seed, split, (tag,), (shares.get(tag) or manager.num_env_groups,))
    return [source.task(index) for index in range(num_tasks)]


def _of_rows(
    examined: Examined, demonstrator: Demonstrator, num_rows: int, split: Split
) -> Iterator[Episode]:
    if not demonstrator.policy.startswith(OPENAI):
        raise ConfigError(
            f"--policy {demonstrator.policy} chooses actions of an environment, and this config plays rows "
            f"of data.{split}_files; name a model that answers them, {OPENAI}URL"
        )
    config = examined.config
    converse = _converse_with_model(config, demonstrator, split)
    sampling = sampling_params(config, split)
    tasks = row_tasks(examined, split)[:num_rows]
    with WatchedRunner() as runner:
        score = build_reward_manager(examined, placed_rewards(config), None, runner)
        names = {task.agent for task in tasks}
        agents = {name: build_row_agent(examined, split, name, runner) for name in names}

        async def answered(task: Task) -> Episode:
            contexts = OpenedContexts(converse(None, task))
            trajectories = await agents[task.agent].run(task, 0, contexts, sampling)
            if score:
                failed = await score(Group(task, trajectories))
                if failed:
                    raise RolloutError(f"{task.id}: {failed[0].error}")
            return Episode(contexts.conversations, outcome_of(trajectories[0]), contexts.tools)

        yield from played_by(runner, answered, tasks, NUM_AT_ONCE)


def as_row(messages: Sequence[Message], tools: Tools = ()) -> str:
    """A conversation as a line of JSON that `turnwise sft` reads, with `?` in place of lone surrogates.
    Raises ConfigError if a message isn't plain text."""
    if not all(isinstance(message.get("content") or "", str) for message in messages):
        raise ConfigError(
            "the environment shows pictures, and demonstrations are text; set its observation to text"
        )
    row: dict[str, list[Any]] = {"messages": list(messages)}
    if tools:
        row["tools"] = list(tools)
    return readable(json.dumps(row, ensure_ascii=False))


def _scripted(demonstrator: Demonstrator, settings: EnvAgentSettings) -> Converse:
    policy = demonstrator.policy
    if ":" in policy:
        make_player: MakePlayer = partial(_user_player, load_class(policy, "--policy", ConfigError))
    elif policy in DEMONSTRATORS:
        make_player = partial(_built_in_player, demonstrator)
    else:
        policies = (*DEMONSTRATORS, "module:Class", f"{OPENAI}URL")
        raise ConfigError(f"--policy {policy!r} isn't one of {', '.join(policies)}")
    return scripted(make_player, settings.action_pattern)


def _built_in_player(demonstrator: Demonstrator, env: Env, task: Task) -> Player:
    if demonstrator.policy == "random":
        return random_player(env, task.seed, demonstrator.actions)
    expert = scripted_player(env, demonstrator.actions)
    if demonstrator.policy == "expert":
        return expert
    random_player(env, task.seed, demonstrator.actions)  # refuses an environment whose actions nobody names
    return ErringPlayer(expert, demonstrator.error_rate, derive_seed(task.seed, "player"))


def _user_player(player_class: type, env: Env, task: Task) -> Player:
    player: Player = player_class(env, derive_seed(task.seed, "player"))
    if not isinstance(player, Acting):
        raise ConfigError(
            f"--policy: {player_class.__name__} has no act(), which returns the next action, or None "
            "to give up"
        )
    return player


def _converse_with_model(config: AgenticConfig, demonstrator: Demonstrator, split: Split) -> Converse:
    chat = model_at(demonstrator.policy, demonstrator.model_name, config)
    sampling = sampling_params(config, split)

    def converse(env: Env | None, task: Task) -> Callable[[SamplingParams, Tools], TextConversation]:
        return lambda limits, tools: TextConversation(
            chat.complete, sibling_sampling(sampling, task, 0), tools
        )

    return converse
