"""Finds rewards by name, and makes them into entries of `data.reward` or into functions to call."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from turnwise.data.math_rewards import FORMULAS, PARTS, combined
from turnwise.errors import ConfigError, nearest
from turnwise.inference.judge import Judge

COLUMNS = ("completions", "ground_truth", "answer")
_FUNCTIONS: dict[str, Callable[..., Any]] = {**PARTS, "combined": combined}
BUILT_IN = (*_FUNCTIONS, "judge")


def find_reward(
    name: str,
    registered: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Callable[..., Any]:
    """The reward function or class called `name`. Raises ConfigError if there is none, or if it can't take
    the arguments."""
    functions = {**_FUNCTIONS, "judge": Judge, **registered}
    if name not in functions:
        raise ConfigError(
            f"reward_type {name!r} isn't one of {', '.join(functions)}.{nearest(name, functions)}"
        )
    allowed = _parameters(functions[name])
    for argument in arguments:
        if allowed is not None and argument not in allowed:
            listed = ", ".join(allowed) or "none"
            raise ConfigError(
                f"{argument} isn't a parameter of {name}; it has {listed}.{nearest(argument, allowed)}"
            )
    if name in _FUNCTIONS:
        try:
            _on_its_columns(functions[name], arguments, ["7"], ground_truth=["7"])
        except (TypeError, ValueError, AttributeError) as error:
            values = ", ".join(f"{key}={value!r:.40}" for key, value in arguments.items())
            raise ConfigError(
                f"reward {name}: can't compute with {values} ({error}); docs/rl_tool.md explains them"
            ) from error
    return functions[name]


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    """The names of a reward's parameters except `COLUMNS`; None if it takes any."""
    parameters = inspect.signature(function).parameters
    if _takes_all(parameters):
        return None
    return [name for name in parameters if name not in COLUMNS]


def _takes_all(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether one of the parameters is `**kwargs`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def reward_sections(
    reward_type: str | list[str] | dict[str, float],
    config: Mapping[str, Any],
    custom: Any,
    registered: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The entries of `data.reward`; `defaults` holds default arguments by the reward's name. The first entry
    decides what a success is, so accuracy comes first. Accuracy is added with weight 0 if only
    `length_penalty`, `step`, `combined` are given. Raises ConfigError for wrong names or arguments."""
    if custom is not None:
        if not callable(custom):
            raise ConfigError(
                f"custom_reward: got {custom!r:.60}; it is a function (completions, **columns) -> numbers"
            )
        return [{"name": custom, "weight": 1.0, "args": dict(config)}]
    weights = _weights(reward_type)
    if len(weights) == 1:
        config = dict.fromkeys(weights, config)
    for key, arguments in config.items():
        if key not in weights or not isinstance(arguments, Mapping):
            raise ConfigError(
                f"reward_config.{key}: several rewards have a dict each, by the name: {', '.join(weights)}"
            )
    sections = []
    for name, weight in weights.items():
        arguments = {**defaults.get(name, {}), **config.get(name, {})}
        reward = find_reward(name, registered, arguments)
        named_reward = reward if name in registered else name
        sections.append({"name": named_reward, "weight": weight, "args": arguments})
    names = list(weights)
    if "accuracy" in names:
        sections.insert(0, sections.pop(names.index("accuracy")))
    elif set(names) <= _FUNCTIONS.keys() - {"format"}:
        sections.insert(0, {"name": "accuracy", "weight": 0.0})
    return sections


def _weights(reward_type: str | list[str] | dict[str, float]) -> dict[str, float]:
    if isinstance(reward_type, str):
        return {reward_type: 1.0}
    if not reward_type:
        raise ConfigError(
            "reward_type is empty, so every answer would be worth the same; name a reward, or remove it"
        )
    if isinstance(reward_type, dict):
        return reward_type
    return dict.fromkeys(reward_type, 1.0)


def create(
    reward_type: str,
    arguments: Mapping[str, Any],
    registered: Mapping[str, Any],
) -> dict[str, Any]:
    """The tool's answer to `create_reward`: the function, its formula, and all its parameters with their
    values."""
    function = find_reward(reward_type, registered, arguments)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in COLUMNS and parameter.default is not parameter.empty
    }
    try:
        judge = Judge(**arguments) if function is Judge else None
    except TypeError as error:
        raise ConfigError(
            f"reward_type judge: {str(error).partition('() ')[2]}; docs/data.md says what they are"
        ) from error
    formula = FORMULAS.get(reward_type) or inspect.getdoc(function) or "your own function"
    return {
        "reward_type": reward_type,
        "description": formula,
        **{**defaults, **arguments},
        "reward_function": judge or partial(_on_its_columns, function, arguments),
    }


def _on_its_columns(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    completions: Sequence[str],
    **columns: Any,
) -> Any:
    """Calls a reward on completions, with those of the rows' columns that it has parameters for (with
    `**kwargs`, all)."""
    parameters = inspect.signature(function).parameters
    if not _takes_all(parameters):
        columns = {name: values for name, values in columns.items() if name in parameters}
    return function(completions, **columns, **arguments)
