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


def find_reward(name: str, registered: Mapping[str, Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
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
            known = ", ".join(allowed) or "none"
            raise ConfigError(
                f"{argument} isn't a parameter of {name}; it has {known}.{nearest(argument, allowed)}"
            )
    if name in _FUNCTIONS:
        try:
            _on_its_columns(functions[name], arguments, ["7"], ground_truth=["7"])
        except (TypeError, ValueError, AttributeError) as error:
            given = ", ".join(f"{key}={value!r:.40}" for key, value in arguments.items())
            raise ConfigError(
                f"reward {name}: can't compute with {given} ({error}); docs/rl_tool.md explains them"
            ) from error
    return functions[name]


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    """The names of a reward's parameters except `COLUMNS`; None if it takes any."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return [name for name in parameters if name not in COLUMNS]


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
    names = [reward_type] if isinstance(reward_type, str) else list(reward_type)
    weights = reward_type if isinstance(reward_type, dict) else dict.fromkeys(names, 1.0)
    if not weights:
        raise ConfigError(
            "reward_type is empty, so every answer would be worth the same; name a reward, or leave it out"
        )
    if len(weights) > 1 and (
        wrong := [key for key in config if key not in weights or not isinstance(config[key], Mapping)]
    ):
        raise ConfigError(
            f"reward_config.{wrong[0]}: several rewards have a dict each, by the name: {', '.join(weights)}"
        )
    sections = []
    for name, weight in weights.items():
        arguments = {**defaults.get(name, {}), **(config if len(weights) == 1 else config.get(name, {}))}
        found = find_reward(name, registered, arguments)
        sections.append({"name": found if name in registered else name, "weight": weight, "args": arguments})
    if "accuracy" in names:
        sections.insert(0, sections.pop(names.index("accuracy")))
    elif set(names) <= _FUNCTIONS.keys() - {"format"}:
        sections.insert(0, {"name": "accuracy", "weight": 0.0})
    return sections


def create(reward_type: str, arguments: Mapping[str, Any], registered: Mapping[str, Any]) -> dict[str, Any]:
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
    function: Callable[..., Any], arguments: Mapping[str, Any], completions: Sequence[str], **columns: Any
) -> Any:
    """Calls a reward on completions, with those of the rows' columns that it has parameters for (with
    `**kwargs`, all)."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return function(
        completions, **{k: v for k, v in columns.items() if takes_all or k in parameters}, **arguments
    )
