"""Builds environments and their agents from a config, and checks its plug-ins. Imports torch only if a plug-in needs it."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import chdir
from functools import partial
from typing import Any, get_args

from turnwise.agents.env_agent import EnvAgentSettings
from turnwise.agents.env_session import CallSettings
from turnwise.agents.foreign_text import OverForeignText
from turnwise.agents.tool_agent import ToolAgentLimits
from turnwise.build.tools import build_interactions, build_tools
from turnwise.config import AgenticConfig
from turnwise.config.problems import Path as KeyPath, Problem
from turnwise.entry_points import load_class
from turnwise.envs.base import TextEnv
from turnwise.envs.contract import check_shape
from turnwise.envs.registry import env_class, make_env, relays_foreign_text
from turnwise.errors import ConfigError, EnvironmentFault, NotAvailableError, TurnwiseError
from turnwise.protocols import AgentLoop, MakeEnv
from turnwise.rollout.group_filter import load_group_filter
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.spec import AGENTS, ENVS, ESTIMATORS, PG_VARIANTS, ROW_AGENTS
from turnwise.types import Split, Task


def offered_parts(config: AgenticConfig, split: Split, watchdog: Watchdog, stopwatch: Stopwatch) -> dict[str, Any]:
    """Objects that an agent's constructor may ask for, by name. The constructor gets those that it has parameters for."""
    agent = config.agent
    return {
        "split": split,
        "seed": config.seed,
        "tools": build_tools(config, watchdog, stopwatch),
        "limits": ToolAgentLimits(agent.max_parallel_calls, agent.max_tool_response_length, agent.tool_response_truncate_side),
        "interactions": build_interactions(config, watchdog, stopwatch),
    }


def named_parameters(called: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of `called` that can be passed by name."""
    parameters = inspect.signature(called).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def asked_parts(parameters: Collection[inspect.Parameter], offered: Mapping[str, Any], agent: str, hint: str) -> dict[str, Any]:
    """The `offered` objects that `parameters` name. Raises ConfigError if a parameter without a default isn't offered."""
    if missing := [p.name for p in parameters if p.default is p.empty and p.name not in offered]:
        raise ConfigError(f"{agent}: its constructor needs {', '.join(missing)}, but is offered {', '.join(offered)}; {hint}")
    return {p.name: offered[p.name] for p in parameters if p.name in offered}


def plug_ins(config: AgenticConfig, may_miss: bool = False) -> Iterator[tuple[KeyPath, Callable[[], object]]]:
    """Yields `(key, check)` for each plug-in; a check that fails raises TurnwiseError. `may_miss` allows missing files."""
    yield ("group_filter",), partial(load_group_filter, config.group_filter)
    if config.adv_estimator not in ESTIMATORS or config.pg_variant not in PG_VARIANTS:
        from turnwise.build.agentic import build_algorithm  # imports torch, as a user's own loss does

        yield ("pg_variant" if config.pg_variant not in PG_VARIANTS else "adv_estimator",), partial(build_algorithm, config)
    if config.data.reward or config.data.train_files:
        from turnwise.build.rows import rows_plug_ins  # imports torch

        yield from rows_plug_ins(config, may_miss)
    for split in get_args(Split):
        for tag in config.env_manager(split).env_tags:
            env = config.custom_envs[tag]
            if "" not in (ENVS.get(env.env_type), AGENTS.get(env.agent_name)):  # not in this version; another check says so
                yield ("custom_envs", tag, "env_type"), partial(env_class, env.env_type)
                yield ("custom_envs", tag, "agent_name"), partial(build_agent, config, tag, split)
                key = "env_config" if env.env_config else "env_type"
                yield ("custom_envs", tag, key), partial(_try_environment, config, tag, split)


def plug_in_problems(config: AgenticConfig, may_miss: bool = False) -> Iterator[Problem]:
    """Yields each plug-in's first fault, then raises the first NotAvailableError, if any. `may_miss` allows missing files."""
    missing, wrong, said = None, set(), set()
    for path, check in plug_ins(config, may_miss):
        section = path[:2]
        if section in wrong:
            continue
        try:
            check()
        except NotAvailableError as error:
            missing = missing or error
        except TurnwiseError as error:
            wrong.add(section)
            if (text := str(error)) not in said:
                said.add(text)
                yield Problem(path, re.sub(rf"^{re.escape(Problem(section, '').key)}(\.\w+)?:? ", "", text))
    if missing:
        raise missing


def _try_environment(config: AgenticConfig, tag: str, split: Split) -> None:
    with (
        Watchdog() as watchdog,
        chdir("."),
        Foreign(f"custom_envs.{tag}: making and closing an environment", "at the start", are_faults=True),
    ):
        calls = agent_settings(config, tag, split, watchdog).calls
        with calls.limit(tag, "the environment's constructor"):
            env = env_factory(config, tag, split)(Task(id="check", tag=tag, split=split, seed=0))
        check_shape(env)
        with calls.limit(tag, f"{type(env).__name__}.close"):
            env.close()
    if isinstance(env, TextEnv) and env.shows_pictures:
        raise EnvironmentFault(
            f"custom_envs.{tag}.env_config: observations are pictures, and no model of this version reads pictures; leave "
            "render_mode: rgb_array out, so that they are text"
        )


def build_agent(
    config: AgenticConfig, tag: str, split: Split, make_env: MakeEnv | None = None, settings: EnvAgentSettings | None = None
) -> AgentLoop:
    """The agent that plays the environments of a tag: a built-in one, or a user's class. Its constructor gets `make_env`, by
    default the tag's `env_factory`; `settings`, by default the tag's `agent_settings`; and any `offered_parts` that it has
    parameters for. Raises ConfigError if there is no such agent, or its constructor requires anything else."""
    env = config.custom_envs[tag]
    name = env.agent_name
    if name in ROW_AGENTS:
        raise ConfigError(
            f"custom_envs.{tag}.agent_name: {name} plays rows of data.train_files, and no environment; leave agent_name out "
            "(env_agent plays environments), or name your own as module:Class"
        )
    what = f"custom_envs.{tag}.agent_name {name}"
    found = load_class(AGENTS.get(name) or name, f"custom_envs.{tag}.agent_name", ConfigError)
    make_env, settings = make_env or env_factory(config, tag, split), settings or agent_settings(config, tag, split)
    more, parts = named_parameters(found)[2:], {}
    if more:
        offered = offered_parts(config, split, settings.calls.watchdog, settings.calls.stopwatch)
        parts = asked_parts(more, offered, what, "after the factory of environments and the settings, which come first")
    agent = make_agent(what, partial(found, make_env, settings, **parts))
    is_foreign = relays_foreign_text(env.env_type) if env.encode_special_tokens is None else not env.encode_special_tokens
    return OverForeignText(agent) if is_foreign else agent


def make_agent(what: str, make: Callable[[], object]) -> AgentLoop:
    """The agent that `make` returns. Raises ConfigError if it has no `run`, EnvironmentFault if `make` raises."""
    with Foreign(f"{what}: making it", "at the start", are_faults=True):
        agent = make()
    if not isinstance(agent, AgentLoop):
        raise ConfigError(f"{what} has no method `run`; see AgentLoop in turnwise/protocols.py")
    return agent


def env_factory(config: AgenticConfig, tag: str, split: Split) -> MakeEnv:
    """A function that makes an environment of the tag for one split. The environment's `reset(seed=...)` decides the task."""
    env = config.custom_envs[tag]
    return lambda task: make_env(env.env_type, env.env_config, split)


def agent_settings(
    config: AgenticConfig, tag: str, split: Split, watchdog: Watchdog | None = None, stopwatch: Stopwatch | None = None
) -> EnvAgentSettings:
    """The limits and prompt texts of a tag's episodes."""
    env, manager = config.custom_envs[tag], config.env_manager(split)
    return EnvAgentSettings(
        tag=tag,
        max_steps=env.max_steps,
        max_tokens_per_step=config.max_new_tokens(split, tag),
        system_template=env.agent_system_template,
        turn_template=env.agent_template,
        action_pattern=env.action_pattern,
        mode=env.mode,
        history_length=env.history_length,
        episode_timeout_s=manager.episode_timeout_s,
        calls=CallSettings(
            timeout_s=manager.env_step_timeout_s,
            max_in_threads=manager.max_env_num_per_worker,
            use_thread_lock=env.use_thread_lock,
            place_timeout_s=config.deadlines.env_s,
            watchdog=watchdog or Watchdog(),
            stopwatch=stopwatch or Stopwatch(),
        ),
    )
