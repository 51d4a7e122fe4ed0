"""Reads a YAML file, a plain mapping, or both, into a validated config."""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError
from typing_extensions import TypeVar

from turnwise.config.checks.contradictions import find_problems, sibling_problems
from turnwise.config.checks.learning_rates import unusual_rates
from turnwise.config.checks.unusual import unusual
from turnwise.config.checks.without_effect import find_ineffective, never_works
from turnwise.config.problems import MAX_SHOWN, Path as KeyPath, Problem, as_sentences, config_error
from turnwise.config.published.coming_from import counterpart, differing_defaults, unknown_leaves
from turnwise.config.published.translate import Translation, translate
from turnwise.config.read.beside import find_beside
from turnwise.config.read.compose import Composed, compose
from turnwise.config.read.yaml_text import MAX_DEPTH, KeyLocations, display
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.sft import SFTConfig
from turnwise.errors import NotAvailableError, nearest

AnyConfig = AgenticConfig | SFTConfig
C = TypeVar("C", AgenticConfig, SFTConfig, default=AgenticConfig)
MAX_CHARACTERS = 100_000
"""Maximum characters of a string: more than any context holds."""
# minimum similarity of a suggested key; names share many words, so a less similar key may be another setting
_LIKENESS = 0.75
Purpose = Literal["train", "play", "show"]
"""What the config is read for: training, playing without training (groups may have one episode), or printing
it."""
Examine = Callable[[Any], Iterable[Problem]]
"""Finds further problems, those of the user's own classes, in a config that is valid by itself."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    kind: type[C] | None = AgenticConfig,  # type: ignore[assignment]  # it is the default of C
    strict: bool = False,
    purpose: Purpose = "train",
    examine: Examine | None = None,
    values: Mapping[str, Any] = types.MappingProxyType({}),
) -> tuple[C, list[str]]:
    """The config of a YAML file with overrides, and notes on keys that were translated, have no effect or are
    unusual. `values` are merged into those of the file. With kind None, a file with `train_files` at its top
    level is an SFTConfig. With `strict`, a key without effect is an error. Raises ConfigError that lists the
    problems, each with file and line."""
    composed = compose(Path(path), overrides)
    _merge_values(composed.values, deepcopy(dict(values)))
    composed.values.setdefault("exp_name", Path(path).stem)
    notes = find_beside(composed.values, Path(path).parent)
    config_class: Any = kind
    if config_class is None:
        config_class = SFTConfig if "train_files" in composed.values else AgenticConfig
    source = display(Path(path))
    config, parse_notes = _parse(
        composed,
        config_class,
        strict,
        source,
        overrides,
        purpose,
        examine,
    )
    return config, notes + parse_notes


def load_any_config(
    path: str | Path, overrides: Sequence[str] = (), strict: bool = False, examine: Examine | None = None
) -> tuple[AnyConfig, list[str]]:
    """Like `load_config`, for an AgenticConfig or SFTConfig that is only to be shown."""
    return load_config(path, overrides, None, strict, "show", examine)


def parse_config(
    values: Mapping[str, Any],
    kind: type[C] = AgenticConfig,  # type: ignore[assignment]  # it is the default of C
    strict: bool = False,
    file: str | Path | None = None,
    examine: Examine | None = None,
) -> tuple[C, list[str]]:
    """Like `load_config`, for a plain mapping. With `file`, the values are merged into those of that file.

    >>> lake = {"Lake": {"env_type": "frozen_lake"}}
    >>> parse_config({"pretrain": "models/tiny", "custom_envs": lake, "ppo_epoch": 2})
    Traceback (most recent call last):
    turnwise.errors.ConfigError: config can't be used: 1 problem.
      ppo_epoch: unknown key. Did you mean 'ppo_epochs'?
    """
    if file is not None:
        return load_config(file, (), kind, strict, examine=examine, values=values)
    composed = Composed(deepcopy(dict(values)), frozenset())
    return _parse(composed, kind, strict, "config", (), "train", examine)


def _merge_values(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Merges the changes into the values in place, section by section."""
    for key, change in changes.items():
        if isinstance(change, dict) and isinstance(values.get(key), dict):
            _merge_values(values[key], change)
        else:
            values[key] = change


def _parse(
    composed: Composed,
    kind: type[C],
    strict: bool,
    source: str,
    overrides: Sequence[str],
    purpose: Purpose,
    examine: Examine | None,
) -> tuple[C, list[str]]:
    problems = list(islice(_not_text(composed.values), MAX_SHOWN))
    if problems:
        raise config_error(source, problems, KeyLocations(composed.files, overrides).of)
    translation = translate(composed.values, frozenset(kind.model_fields), composed.interpolated)
    problems = list(translation.problems)
    config = _validate(kind, translation, problems)
    without_effect = list(translation.ineffective)
    if config is not None:
        problems += translation.refusing(find_problems(config))
        problems += _sibling_problems(config, translation, purpose)
        without_effect += find_ineffective(config)
    if strict:
        problems += without_effect
    notes = translation.notes + as_sentences(without_effect)
    if config is not None:
        idle = {problem.path for problem in without_effect}
        notes += as_sentences(_unusual_values(config, idle))
        if purpose != "play" and _has_idle_rows(config):
            notes.append(
                "data.val_files: eval_steps is 0, so these rows are not played while training; set eval_steps"
            )
    if examine is not None and config is not None and not problems:
        try:
            for problem in examine(config):
                problems.append(problem)  # one by one: problems that were found before an error are reported
        except NotAvailableError:
            if not problems:
                raise
    if translation.is_published and isinstance(config, AgenticConfig):
        differing = differing_defaults(config)
        if differing:
            notes.append(differing)
    if problems or config is None:
        raise config_error(source, problems, KeyLocations(composed.files, overrides).of)
    return config, notes


def _has_idle_rows(config: AnyConfig) -> bool:
    """Whether rows for validation are named, and no validation plays them."""
    if isinstance(config, SFTConfig) or config.uses_validation:
        return False
    return bool(config.data.train_files and config.data.val_files)


def _unusual_values(config: AnyConfig, idle: set[KeyPath]) -> Iterator[Problem]:
    """Values that are allowed but far outside of what trains; those in `idle` have no effect."""
    yield from unusual(config, idle)
    yield from unusual_rates(config, idle)


def _sibling_problems(config: AnyConfig, translation: Translation, purpose: Purpose) -> list[Problem]:
    """Returns `sibling_problems`; none to "play". To "show" a published file, adds notes instead: it may be
    meant for play."""
    if purpose == "play":
        return []
    problems = list(sibling_problems(config))
    if purpose == "show" and translation.is_published:
        for line in as_sentences(problems):
            translation.notes.append(f"{line}; `train` refuses that, `rollout` and `eval` play it")
        return []
    return problems


def _not_text(value: Any, path: KeyPath = ()) -> Iterator[Problem]:
    """Problems of strings that are too long or aren't text, and of values nested too deep, such as a list in
    itself."""
    if len(path) > MAX_DEPTH:
        yield Problem(path[:4], f"holds more than {MAX_DEPTH} nested sections; a config has a few")
    elif isinstance(value, str) and len(value) > MAX_CHARACTERS:
        yield Problem(
            path, f"has {len(value):,} characters, and at most {MAX_CHARACTERS:,} are read; shorten it"
        )
    elif isinstance(value, str) and any(_is_no_text(character) for character in value):
        yield Problem(
            path,
            f"{value!r} holds a NUL or half a surrogate pair, which no text has; write it again, as UTF-8",
        )
    elif isinstance(value, dict):
        for key, item in value.items():
            printable = str(key).encode(errors="backslashreplace").decode()
            yield from _not_text(key, (*path, printable))
            yield from _not_text(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_text(item, (*path, index))


def _is_no_text(character: str) -> bool:
    """Whether a character is NUL or half a surrogate pair."""
    return character == "\0" or "\ud800" <= character <= "\udfff"


def _validate(kind: type[C], translation: Translation, problems: list[Problem]) -> C | None:
    """The config, or None if values are invalid. Adds faults to `problems`. Removes unknown keys, to check
    the others."""
    raw = translation.raw
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    unknown = [item for item in faults if item["type"] == "extra_forbidden"]
    wrong = [item for item in faults if item["type"] != "extra_forbidden"]
    everything: list[Problem] = []
    for item in unknown:
        everything += [_unknown_key(kind, path) for path in unknown_leaves(item["loc"], item["input"])]
    everything += _merge([_field_problem(raw, item) for item in wrong])
    refusing = translation.refusing(everything)
    if len(refusing) < len(everything):
        return _validate(kind, translation, problems)
    problems += refusing
    if wrong:
        return None
    for item in unknown:
        *parts, key = item["loc"]
        section: Any = raw
        for part in parts:
            section = section[part]
        section.pop(key, None)
    return _validate(kind, translation, problems)


_HOW_TO_SET: Mapping[Any, str] = {
    "pretrain": " to the folder of a model, or to a name of the Hugging Face hub (pretrain=DIR on the "
    "command line). "
    "`turnwise make-model --size tiny --out runs/model` makes a small one with random weights"
}


def _field_problem(raw: Any, item: Mapping[str, Any]) -> Problem:
    path: list[str | int] = []
    for part in item["loc"]:
        is_there = _holds(raw, part)
        if not is_there and item["type"] != "missing":
            break  # the rest of `loc` names a branch of a union instead of a key
        path.append(part)
        raw = raw[part] if is_there else None
    if item["type"] == "missing":
        how_to = _HOW_TO_SET.get(path[-1], "")
        return Problem(tuple(path), f"this key has no default; set it{how_to}")
    message = item["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if item["type"] != "value_error":
        message += f" (got {item['input']!r:.60})"
    return Problem(tuple(path), message)


def _holds(container: Any, part: str | int) -> bool:
    if isinstance(container, list):
        return isinstance(part, int) and part < len(container)
    return isinstance(container, dict) and part in container


def _merge(problems: list[Problem]) -> list[Problem]:
    """Merges the problems of each key into one: every branch of a union reports its own."""
    by_path: dict[KeyPath, list[str]] = {}
    for problem in problems:
        by_path.setdefault(problem.path, []).append(problem.message)
    merged: list[Problem] = []
    for path, messages in by_path.items():
        distinct = dict.fromkeys(messages)
        merged.append(Problem(path, "; or ".join(distinct)))
    return merged


def _unknown_key(kind: type[BaseModel], path: KeyPath) -> Problem:
    name = str(path[-1])
    sections = dict(_sections(kind))
    parts = list(path[:-1])
    if len(parts) > 1 and parts[0] == "custom_envs":
        parts[1] = "<tag>"
    here = ".".join(part for part in parts if isinstance(part, str))
    homes = [home for home in _homes(name, sections) if home != here]
    nearby = [home for home in homes if home.startswith(f"{path[0]}.")]
    hint = ""
    if not nearby:
        hint = counterpart(path, kind.model_fields)
    if not hint and homes:
        shown = [home or "the top level" for home in (nearby or homes)[:3]]
        hint = f" It belongs in {' or '.join(shown)}."
    is_in_section = len(path) == 1 or path[0] in kind.model_fields
    if not hint and here in sections and is_in_section:
        hint = nearest(name, sections[here].model_fields, _LIKENESS)
    return Problem(path, f"unknown key.{hint}")


def _homes(name: str, sections: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    """The sections in which a key of this name does something."""
    for home, section in sections.items():
        if name not in section.model_fields or home.startswith("reward."):
            continue
        if not never_works(f"{home}.{name}"):
            yield home


def _sections(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """`(dotted path, class)` of every section of a kind of config."""
    yield path, section
    for key, field in section.model_fields.items():
        name = f"{path}.{key}" if path else key
        if key == "custom_envs":
            name += ".<tag>"
        for model in _models(field.annotation):
            yield from _sections(model, name)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
