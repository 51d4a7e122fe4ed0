"""The classes of the agents that a config names, and the settings of their episodes. Makes no agent."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from turnwise.agents.env_agent import EnvAgentSettings
from turnwise.agents.env_session import CallSettings
from turnwise.agents.react_agent import ReactAgentLoop, require_langgraph
from turnwise.config import AgenticConfig
from turnwise.config.read.agent_files import LoopEntry
from turnwise.errors import ConfigError
from turnwise.examine.constructors import named_parameters, require_offered
from turnwise.examine.gateway import GATEWAY, game_of_rows, game_of_tag
from turnwise.protocols import AgentLoop
from turnwise.published.agent_loop import AgentLoopBase
from turnwise.published.played_loop import PlayedLoop
from turnwise.runtime.entry_points import load_class
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.spec import AGENTS, ROW_AGENTS
from turnwise.types import Split

OFFERED = (
    "split",
    "seed",
    "tools",
    "limits",
    "interactions",
    "requests",
    "make_graph",
    "published_config",
    "tokenizer",
)
"""Names of the objects that an agent's constructor may ask for."""


@dataclass(frozen=True, slots=True)
class AgentClass:
    """The class of an agent, and what its constructor is called with."""

    label: str
    """Names the setting and the class, for messages."""
    make: Callable[..., object]
    offered: Sequence[str]
    """The names of `OFFERED`, and `settings` for rows, that the constructor has parameters for."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments, from `agent.agent_config_path`."""
    loaded: object = None
    """The class itself, whose `init_class` is called once if it has one."""


def env_agent_class(config: AgenticConfig, tag: str) -> AgentClass:
    """The class that plays the environments of a tag. Its constructor is called with a factory of
    environments, the settings and what it asks for of `OFFERED`. Raises ConfigError if there is no such
    class, or it requires anything else."""
    name = config.custom_envs[tag].agent_name
    key = f"custom_envs.{tag}.agent_name"
    if name == GATEWAY:
        game_of_tag(config, tag)
        return AgentClass(f"{key} {name}", load_class(AGENTS[name], key, ConfigError), ())
    if name in ROW_AGENTS:
        raise ConfigError(
            f"{key}: {name} plays rows of data.train_files, and no environment; remove agent_name "
            "(env_agent plays environments), or name your own as module:Class"
        )
    label = f"{key} {name}"
    make = load_class(AGENTS.get(name) or name, key, ConfigError)
    parameters = named_parameters(make)[2:]
    hint = "after the factory of environments and the settings, which come first"
    offered = require_offered(parameters, OFFERED, label, hint)
    try:
        inspect.signature(make).bind(None, None, **dict.fromkeys(offered))
    except TypeError as fault:
        raise ConfigError(
            f"{label}: its constructor is called with a factory of environments and the settings: {fault}"
        ) from fault
    _require_run(make, label)
    return AgentClass(label, make, offered)


def row_agent_class(config: AgenticConfig, loops: Mapping[str, LoopEntry], name: str) -> AgentClass:
    """The class that rows call `name`. Its constructor is called with the arguments in
    `agent.agent_config_path` and what it asks for of `settings` and `OFFERED`. Raises ConfigError if it
    requires more, or doesn't know an argument."""
    loop = loops.get(name)
    arguments: Mapping[str, Any] = {}
    target = AGENTS.get(name) or name
    if loop is not None:
        arguments = loop.model_extra or {}
        target = AGENTS.get(loop.target) or loop.target
    if target == AGENTS[GATEWAY]:
        game_of_rows(config, loop)
        return AgentClass(f"the agent {name}", load_class(target, "the agent", ConfigError), ())
    make = load_class(target, "the agent", ConfigError)
    label = f"the agent {name}"
    if config.estimator.needs_state_keys and issubclass(make, AgentLoopBase | ReactAgentLoop):
        raise ConfigError(
            f"{label}: adv_estimator {config.adv_estimator} compares turns that were taken in the same "
            "state, and the turns of graphs and of published loops have none; use grpo"
        )
    if issubclass(make, AgentLoopBase):
        played = partial(PlayedLoop, make, arguments)
        return AgentClass(
            label,
            played,
            ("settings", "published_config", "tokenizer"),
            loaded=make,
        )
    if issubclass(make, ReactAgentLoop):
        require_langgraph()
    hint = "an agent that plays an environment is the agent_name of its tag in custom_envs"
    allowed = ["settings", *OFFERED, *arguments]
    offered = require_offered(named_parameters(make), allowed, label, hint)
    for key in arguments:
        if key not in offered:
            raise ConfigError(
                f"agent.agent_config_path {config.agent.agent_config_path}: {key} isn't a parameter of {name}"
            )
    _require_run(make, label)
    of_run = [key for key in offered if key not in arguments]
    return AgentClass(label, make, of_run, arguments, loaded=make)


def _require_run(make: Callable[..., object], label: str) -> None:
    """Raises ConfigError for a class that can't be an agent's."""
    if isinstance(make, type) and not issubclass(make, AgentLoop):
        raise ConfigError(f"{label} has no method `run`; see AgentLoop in turnwise/protocols/episodes.py")


def agent_settings(
    config: AgenticConfig,
    tag: str,
    split: Split,
    watchdog: Watchdog | None = None,
    stopwatch: Stopwatch | None = None,
) -> EnvAgentSettings:
    """The limits and prompt texts of a tag's episodes."""
    env = config.custom_envs[tag]
    manager = config.env_manager(split)
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
            max_in_threads=0 if config.deterministic else manager.max_env_num_per_worker,
            use_thread_lock=env.use_thread_lock,
            place_timeout_s=config.deadlines.env_s,
            watchdog=watchdog or Watchdog(),
            stopwatch=stopwatch or Stopwatch(),
        ),
    )
