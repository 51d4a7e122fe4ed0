"""From a YAML file, or a plain mapping, to a validated config."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar, get_args, overload

from pydantic import BaseModel, ValidationError

from turnwise.config.checks import find_problems
from turnwise.config.compose import Composed, compose
from turnwise.config.effects import find_ineffective
from turnwise.config.positions import Positions, display
from turnwise.config.problems import Path as KeyPath
from turnwise.config.problems import Problem, as_sentences, config_error
from turnwise.config.published import translate
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig
from turnwise.errors import nearest

AnyConfig = AgenticConfig | SFTConfig
C = TypeVar("C", AgenticConfig, SFTConfig)
Kind = type[AgenticConfig] | type[SFTConfig]


@overload
def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, strict: bool = False
) -> tuple[AgenticConfig, list[str]]: ...
@overload
def load_config(
    path: str | Path, overrides: Sequence[str] = (), kind: type[C] = ..., strict: bool = False
) -> tuple[C, list[str]]: ...
def load_config(
    path: str | Path, overrides: Sequence[str] = (), kind: Any = AgenticConfig, strict: bool = False
) -> tuple[Any, list[str]]:
    """The config of a YAML file with overrides, and notes on what was translated or has no effect.

    Raises:
        ConfigError: every problem that was found, with file and line. With `strict`, keys without effect are problems.
    """
    return _load(Path(path), overrides, lambda _: kind, strict)


def load_any_config(path: str | Path, overrides: Sequence[str] = (), strict: bool = False) -> tuple[AnyConfig, list[str]]:
    """Like `load_config` for a file of either kind: one with `train_files` at its top level is an SFTConfig."""
    return _load(Path(path), overrides, _kind_of, strict)


@overload
def parse_config(values: Mapping[str, Any], *, strict: bool = False) -> tuple[AgenticConfig, list[str]]: ...
@overload
def parse_config(values: Mapping[str, Any], kind: type[C] = ..., strict: bool = False) -> tuple[C, list[str]]: ...
def parse_config(values: Mapping[str, Any], kind: Any = AgenticConfig, strict: bool = False) -> tuple[Any, list[str]]:
    """The config of a plain mapping, checked as a file would be.

    >>> lake = {"Lake": {"env_type": "frozen_lake"}}
    >>> parse_config({"pretrain": "models/tiny", "custom_envs": lake, "ppo_epoch": 2})
    Traceback (most recent call last):
    turnwise.errors.ConfigError: config can't be used: 1 problem.
      ppo_epoch: unknown key. Did you mean 'ppo_epochs'?
    """
    return _parse(Composed(deepcopy(dict(values)), frozenset()), kind, strict, "config", lambda: lambda key: "")


def _load(
    path: Path, overrides: Sequence[str], choose: Callable[[dict[str, Any]], type[C]], strict: bool
) -> tuple[C, list[str]]:
    composed = compose(path, overrides)
    composed.values.setdefault("exp_name", path.stem)
    kind = choose(composed.values)
    return _parse(composed, kind, strict, display(path), lambda: Positions(path, overrides).of)


def _kind_of(values: dict[str, Any]) -> Any:
    return SFTConfig if "train_files" in values else AgenticConfig


def _parse(
    composed: Composed, kind: type[C], strict: bool, source: str, positions: Callable[[], Callable[[KeyPath], str]]
) -> tuple[C, list[str]]:
    translation = translate(composed.values, frozenset(kind.model_fields), composed.interpolated)
    problems = list(translation.problems)
    config = _validate(kind, translation.raw, problems)
    without_effect = list(translation.ineffective)
    if config is not None:
        problems += find_problems(config)
        without_effect += find_ineffective(config)
    if strict:
        problems += without_effect
    notes = translation.notes + as_sentences(without_effect)
    if problems or config is None:
        raise config_error(source, problems, positions())
    return config, notes


def _validate(kind: type[C], raw: dict[str, Any], problems: list[Problem]) -> C | None:
    """The model, or None. Unknown keys are reported and left out, so that everything else is checked as well."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        found = error.errors(include_url=False)
    unknown = [item for item in found if item["type"] == "extra_forbidden"]
    problems += [_unknown_key(kind, item["loc"]) for item in unknown]
    problems += _merge([_field_problem(raw, item) for item in found if item["type"] != "extra_forbidden"])
    if len(unknown) < len(found):
        return None
    for item in unknown:
        _remove(raw, item["loc"])
    return _validate(kind, raw, problems)


def _remove(raw: Any, path: KeyPath) -> None:
    for part in path[:-1]:
        raw = raw[part]
    raw.pop(path[-1], None)


def _field_problem(raw: Any, item: Mapping[str, Any]) -> Problem:
    path: list[str | int] = []
    for part in item["loc"]:
        is_there = _holds(raw, part)
        if not is_there and item["type"] != "missing":
            break  # what follows names the branch of a union, not a key
        path.append(part)
        raw = raw[part] if is_there else None
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "missing":
        return Problem(tuple(path), "this key has no default; set it")
    shown = "" if item["type"] == "value_error" else f" (got {_short(item['input'])})"
    return Problem(tuple(path), message[:1].lower() + message[1:] + shown)


def _holds(container: Any, part: str | int) -> bool:
    if isinstance(container, list):
        return isinstance(part, int) and part < len(container)
    return isinstance(container, dict) and part in container


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _merge(problems: list[Problem]) -> list[Problem]:
    """One problem a key: the branches of a union each complain."""
    by_path: dict[KeyPath, list[str]] = {}
    for problem in problems:
        by_path.setdefault(problem.path, []).append(problem.message)
    return [Problem(path, "; or ".join(dict.fromkeys(messages))) for path, messages in by_path.items()]


def _unknown_key(kind: Kind, path: KeyPath) -> Problem:
    name = str(path[-1])
    section = _section_at(kind, path[:-1])
    hint = nearest(name, section.model_fields) if section else ""
    homes = [home for home in _homes(kind, name) if home != ".".join(str(part) for part in path[:-1])]
    homes = [home for home in homes if home.startswith(f"{path[0]}.")] or homes
    if not hint and homes:
        hint = f" It belongs in {' or '.join(home or 'the top level' for home in homes[:3])}."
    return Problem(path, f"unknown key.{hint}")


def _section_at(kind: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The model of the section at a path."""
    section: type[BaseModel] | None = kind
    for part in path:
        if isinstance(part, str) and section is not None and part in section.model_fields:
            annotation = section.model_fields[part].annotation
            section = next(_models(annotation), None)
    return section


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _homes(section: type[BaseModel], name: str, prefix: str = "") -> Iterator[str]:
    """Dotted paths of the sections that have a key of this name."""
    if name in section.model_fields:
        yield prefix
    for key, field in section.model_fields.items():
        for model in _models(field.annotation):
            inner = f"{key}.<tag>" if key == "custom_envs" else key
            yield from _homes(model, name, f"{prefix}.{inner}" if prefix else inner)
