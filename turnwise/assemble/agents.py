"""Builds the agents that play environments and rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from turnwise.agents.env_agent import EnvAgentSettings
from turnwise.agents.foreign_text import OverForeignText
from turnwise.agents.model_calls import RequestSettings
from turnwise.agents.react_agent import ReactAgentLoop
from turnwise.agents.single_turn_agent import RowAgentSettings
from turnwise.agents.tool_agent import ToolAgentLimits
from turnwise.assemble.gateway import RunGateway
from turnwise.assemble.published_settings import published_settings
from turnwise.config import AgenticConfig
from turnwise.envs.registry import relays_foreign_text
from turnwise.errors import ConfigError
from turnwise.examine.agents import (
    OFFERED,
    AgentClass,
    agent_settings,
    env_agent_class,
    row_agent_class,
)
from turnwise.examine.envs import env_factory
from turnwise.examine.examined import Examined
from turnwise.examine.gateway import GATEWAY, mistakes_of
from turnwise.protocols import AgentLoop, MakeEnv
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.spec import ROWS_TAG
from turnwise.types import Split

NEEDS_MODEL = (
    "this command doesn't play agents of the gateway, which play over HTTP; turnwise rollout and turnwise "
    "eval do"
)


@runtime_checkable
class InitialisesClass(Protocol):
    """A class of agents that is prepared before its first agent is made."""

    def init_class(self, config: Any, tokenizer: Any) -> None: ...


def build_agent(
    examined: Examined,
    tag: str,
    split: Split,
    make_env: MakeEnv | None = None,
    settings: EnvAgentSettings | None = None,
    gateway: RunGateway | None = None,
) -> AgentLoop:
    """The agent that plays the environments of a tag: a built-in one, or a user's class. Its constructor gets
    `make_env`, by default the tag's `env_factory`; `settings`, by default the tag's `agent_settings`; and
    what it asks for of `OFFERED`."""
    config = examined.config
    env = config.custom_envs[tag]
    if env.agent_name == GATEWAY:
        if gateway is None:
            raise ConfigError(f"custom_envs.{tag}.agent_name: {NEEDS_MODEL}")
        return gateway.agent_of_environment(tag, split, make_env or env_factory(config, tag, split))
    kind = env_agent_class(config, tag)
    make_env = make_env or env_factory(config, tag, split)
    settings = settings or agent_settings(config, tag, split)
    parts = _parts(examined, kind, split, settings.calls.watchdog, settings.calls.stopwatch)
    agent = _make(kind, partial(kind.make, make_env, settings, **parts))
    encodes_special_tokens = env.encode_special_tokens
    if encodes_special_tokens is None:
        encodes_special_tokens = not relays_foreign_text(env.env_type)
    if encodes_special_tokens:
        return agent
    return OverForeignText(agent)


def build_row_agent(
    examined: Examined,
    split: Split,
    name: str,
    event_loop: WatchedRunner,
    gateway: RunGateway | None = None,
) -> AgentLoop:
    """The agent that rows call `name`."""
    config = examined.config
    loop = examined.loops.get(name)
    if name == GATEWAY or (loop is not None and loop.target == GATEWAY):
        if gateway is None:
            raise ConfigError(f"the agent {name}: {NEEDS_MODEL}")
        return gateway.agent_of_rows(split, loop)
    kind = row_agent_class(config, examined.loops, name)
    _prepare(examined, kind, split)
    parts = _parts(examined, kind, split, event_loop.watchdog, event_loop.stopwatch)
    if "settings" in kind.offered:
        parts["settings"] = RowAgentSettings(
            config.data.prompt_key,
            config.max_new_tokens(split, ROWS_TAG),
            config.agent.max_assistant_turns,
            config.agent.max_user_turns,
        )
    return _make(kind, partial(kind.make, **parts, **kind.arguments))


def _prepare(examined: Examined, kind: AgentClass, split: Split) -> None:
    """Calls the `init_class` of a user's class that has one, as published loops have it: once a run."""
    loaded = kind.loaded
    if loaded is ReactAgentLoop or not isinstance(loaded, InitialisesClass) or loaded in examined.prepared:
        return
    examined.prepared.add(loaded)
    tokenizer = examined.policy().tokenizer
    with Foreign(f"{kind.label}: init_class", "at the start", are_faults=True):
        loaded.init_class(published_settings(examined.config, split), tokenizer)


def _parts(
    examined: Examined,
    kind: AgentClass,
    split: Split,
    watchdog: Watchdog,
    stopwatch: Stopwatch,
) -> dict[str, Any]:
    """The objects of `OFFERED` that the constructor asks for, by name."""
    agent = examined.config.agent
    makers: dict[str, Callable[[], Any]] = {
        "split": lambda: split,
        "seed": lambda: examined.config.seed,
        "tools": lambda: examined.tools.watched(watchdog, stopwatch),
        "limits": lambda: ToolAgentLimits(
            agent.max_parallel_calls, agent.max_tool_response_length, agent.tool_response_truncate_side
        ),
        "published_config": lambda: published_settings(examined.config, split),
        "tokenizer": lambda: examined.policy().tokenizer,
        "make_graph": lambda: examined.make_graph,
        "requests": lambda: _request_settings(examined.config),
        "interactions": lambda: examined.users.watched(watchdog, stopwatch),
    }
    return {name: makers[name]() for name in OFFERED if name in kind.offered}


def _request_settings(config: AgenticConfig) -> RequestSettings:
    gateway = config.gateway
    return RequestSettings(
        match=gateway.match,
        is_strict=gateway.strict,
        takes_temperature=gateway.client_temperature,
        mistakes=mistakes_of(config.agent, "agent"),
        mistake_reward=config.agent.mistake_reward,
    )


def _make(kind: AgentClass, make: Callable[[], object]) -> AgentLoop:
    """The agent that `make` returns. Raises ConfigError if it has no `run`, EnvironmentFault if `make`
    raises."""
    with Foreign(f"{kind.label}: making it", "at the start", are_faults=True):
        agent = make()
    if not isinstance(agent, AgentLoop):
        raise ConfigError(
            f"{kind.label} has no method `run`; see AgentLoop in turnwise/protocols/episodes.py"
        )
    return agent
