"""What agents of the gateway play, as the config names it: a function or a command, and the exceptions that
are mistakes of the model."""

import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turnwise.agents.played_function import OFFERED
from turnwise.config import AgenticConfig
from turnwise.config.read.agent_files import LoopEntry
from turnwise.config.schema.gateway import GatewayPlay, gateway_arguments
from turnwise.errors import ConfigError, NotAvailableError, install_hint
from turnwise.examine.constructors import required_names
from turnwise.examine.examined import Examined
from turnwise.examine.rows import splits_with_rows
from turnwise.runtime.entry_points import load_class, load_object
from turnwise.types import Task

_CALLED_WITH = ("base_url", "api_key", "task")
GATEWAY = "gateway"
"""The name of the agent."""


@dataclass(frozen=True, slots=True)
class GatewayGame:
    """What is played: keys of `agent` with those that win over them, checked."""

    keys: GatewayPlay
    label: str
    function: Callable[..., Any] | None
    offered: tuple[str, ...]
    """What the function gets beside base URL, key and task."""
    command: Sequence[str]
    mistakes: tuple[type[BaseException], ...]
    models: Mapping[str, Any]
    model: str
    """The first name that isn't a pattern."""


def game_of_tag(config: AgenticConfig, tag: str) -> GatewayGame:
    """What the agent of an environment plays. Raises ConfigError, which names the key, for a wrong one."""
    arguments = config.custom_envs[tag].agent_args
    keys = config.gateway_play(arguments)
    if keys.command is not None and keys.play is None:
        key = f"custom_envs.{tag}.agent_name"
        raise ConfigError(f"{key}: a command can't reach the environment; name a function in agent.play")
    section = f"custom_envs.{tag}.agent_args" if arguments else "agent"
    return _game(config, keys, section)


def game_of_rows(config: AgenticConfig, loop: LoopEntry | None = None) -> GatewayGame:
    """What the agent of rows plays, with the arguments of its entry in `agent.agent_config_path`, if there
    is one. Raises ConfigError, which names the key, for a wrong one."""
    if loop is None:
        return _game(config, config.gateway_play({}), "agent")
    section = f"agent.agent_config_path {config.agent.agent_config_path}, {loop.name}"
    try:
        arguments = gateway_arguments(loop.model_extra or {})
    except ValueError as fault:
        raise ConfigError(f"{section}: {fault}") from None
    return _game(config, config.gateway_play(arguments), section)


def check_players(examined: Examined) -> None:
    """Raises ConfigError if nothing plays what `agent` names, or if rows name the gateway's agent in a run
    that can't have it."""
    config = examined.config
    if config.names_gateway:
        return
    places: dict[str, str] = {}
    for split in splits_with_rows(config):
        places |= examined.rows(split).agents()
    named = [name for name in places if _is_gateway(examined, name)]
    if not named and (config.agent.play or config.agent.command):
        raise ConfigError(
            "agent.play: nothing is played through the gateway; set data.default_agent: gateway, or name it "
            f"in the column {config.data.agent_name_key} of rows"
        )
    if named and (config.deterministic or config.estimator.needs_state_keys):
        key = "deterministic: true" if config.deterministic else f"adv_estimator: {config.adv_estimator}"
        raise ConfigError(f"{places[named[0]]}: {key} can't have the agent {named[0]}")


def is_of_gateway(examined: Examined, task: Task) -> bool:
    """Whether a task is played through the gateway."""
    if task.row is not None:
        return _is_gateway(examined, task.agent)
    return task.tag in examined.config.gateway_tags


def _is_gateway(examined: Examined, name: str) -> bool:
    """Whether an agent of rows is the gateway's."""
    loop = examined.loops.get(name)
    return name == GATEWAY or (loop is not None and loop.target == GATEWAY)


def _game(config: AgenticConfig, keys: GatewayPlay, section: str) -> GatewayGame:
    if find_spec("aiohttp") is None:
        raise NotAvailableError(
            f"the agent {GATEWAY} needs aiohttp, which isn't installed: {install_hint('gateway')}"
        )
    if (keys.play is None) == (keys.command is None):
        what = "both are set" if keys.play else "neither is set"
        raise ConfigError(
            f"{section}.play, {section}.command: {what}; the agent gateway plays one of them, your function "
            "module:function or a command [program, argument]"
        )
    folder = Path(config.actor_train.model_args.model_name_or_path).name
    models = keys.models or {folder: "trained"}
    names = [name for name in models if not set("*?[") & set(name)]
    if "trained" not in models.values():
        raise ConfigError(f"{section}.models: no name is `trained`, so nothing would be trained on")
    label = f"{section}.command {keys.command[0]}" if keys.command else f"{section}.play {keys.play}"
    function = None
    offered: tuple[str, ...] = ()
    if keys.play is not None:
        function = load_object(keys.play, f"{section}.play", ConfigError)
        offered = _offered(function, label)
    command = _whole_paths(keys.command, label) if keys.command else []
    mistakes = mistakes_of(keys, section)
    return GatewayGame(
        keys,
        label,
        function,
        offered,
        command,
        mistakes,
        models,
        (names or [folder])[0],
    )


def mistakes_of(keys: GatewayPlay, section: str) -> tuple[type[BaseException], ...]:
    """The exceptions of an agent that are mistakes of the model. Raises ConfigError for a class that is no
    exception."""
    return tuple(_mistake(name, section) for name in keys.mistakes)


def _offered(function: Any, label: str) -> tuple[str, ...]:
    if not callable(function):
        raise ConfigError(f"{label} is a {type(function).__name__}, and no function")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return ()
    names = [name for name in OFFERED if name in parameters]
    try:
        inspect.signature(function).bind(*_CALLED_WITH, **dict.fromkeys(names))
    except TypeError as fault:
        needed = [name for name in required_names(parameters.values()) if name not in OFFERED]
        raise ConfigError(
            f"{label}: {fault}; it is called as function({', '.join(_CALLED_WITH)}), with those of "
            f"{', '.join(OFFERED)} that it names (it needs {', '.join(needed) or 'nothing'})"
        ) from None
    return tuple(names)


def _whole_paths(command: Sequence[str], label: str) -> list[str]:
    """The command with whole paths in place of files of the working directory, since it runs in a folder of
    its own."""
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"{label}: there is no such program; name one on PATH, or its whole path")
    arguments = [str(Path(word).absolute()) if Path(word).is_file() else word for word in command[1:]]
    return [str(Path(program).absolute()), *arguments]


def _mistake(name: str, section: str) -> type[BaseException]:
    kind = load_class(name, f"{section}.mistakes", ConfigError)
    if not issubclass(kind, Exception):
        raise ConfigError(f"{section}.mistakes {name!r} is no exception")
    return kind
