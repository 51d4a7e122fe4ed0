"""Converts a Trainer's arguments to values of a config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from turnwise.errors import ConfigError
from turnwise.trainer.objects import Objects


def plain_values(value: Any, objects: Objects, key: str) -> Any:
    """Values that a YAML file could hold as well: classes and functions by their texts.

    Raises:
        ConfigError: the value is something else.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Path():
            return str(value)
        case type() | FunctionType():
            return objects.text_of(value)
        case Mapping():
            return {name: plain_values(inner, objects, f"{key}.{name}") for name, inner in value.items()}
        case list() | tuple():
            return [plain_values(inner, objects, f"{key}[{index}]") for index, inner in enumerate(value)]
        case _ if callable(value):
            return objects.text_of(value)
    kind = type(value).__name__
    raise ConfigError(
        f"{key}: got {str(value)[:60]!r}, an instance of {kind}; a setting is a number, a text, a list or a dict, a class or a "
        f"function. An environment is given by its class, and its arguments by env={{'{kind}': {{'env_type': {kind}, "
        "'env_config': {…}}}"
    )


def custom_envs(env: Any) -> dict[str, Any]:
    """Environments by tag, from one (a class, a text, or a section with `env_type`) or several by their tags."""
    if not isinstance(env, Mapping) or "env_type" in env:
        kind = env["env_type"] if isinstance(env, Mapping) else env
        name = kind.__name__ if isinstance(kind, type) else str(kind) if isinstance(kind, str) else type(kind).__name__
        env = {name.rpartition(":")[2]: env}
    return {tag: given if isinstance(given, Mapping) else {"env_type": given} for tag, given in env.items()}


def data_section(
    train_dataset: Any, eval_dataset: Any, reward_funcs: Any, reward_weights: Sequence[float] | None, objects: Objects
) -> dict[str, Any]:
    """The keys of `data`.

    Raises:
        ConfigError: there aren't as many weights as functions.
    """
    section: dict[str, Any] = {}
    for key, rows in (("train_files", train_dataset), ("val_files", eval_dataset)):
        if rows is not None:
            section[key] = _files(rows, objects)
    if reward_funcs is not None:
        functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        weights = [1.0] * len(functions) if reward_weights is None else reward_weights
        if len(weights) != len(functions):
            raise ConfigError(f"reward_weights: {len(weights)} numbers for {len(functions)} reward_funcs; give one for each")
        section["reward"] = [{"name": name, "weight": float(w)} for name, w in zip(functions, weights, strict=True)]
    elif reward_weights is not None:
        raise ConfigError("reward_weights: there are no reward_funcs that they could weigh; add those, or leave this out")
    return section


def _files(rows: Any, objects: Objects) -> list[str]:
    """Names of files or of hub data sets as they are, and rows by a text that stands for them."""
    if isinstance(rows, str | Path):
        return [str(rows)]
    if isinstance(rows, list | tuple) and rows and all(isinstance(name, str | Path) for name in rows):
        return [str(name) for name in rows]
    if not isinstance(rows, Iterable):
        raise ConfigError(f"a data set is a list of dicts, a datasets.Dataset or names of files; got {type(rows).__name__}")
    return [objects.text_of(list(rows) if isinstance(rows, Iterator) else rows)]
