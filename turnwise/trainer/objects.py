"""Converts a Trainer's arguments to values of a config. A Python object becomes a string: module, name and
source hash."""

import hashlib
import inspect
import marshal
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from turnwise.data.tables import listed
from turnwise.errors import ConfigError
from turnwise.protocols import Tool
from turnwise.runtime.entry_points import OBJECT_PREFIX


class Objects:
    """Maps strings of the form `object_<hash>.<module>:<name>` to the Python objects that a Trainer was
    given.

    `install` puts each object into a module `object_<hash>.<module>`; then its string works like any
    `module:Class`. Objects of turnwise itself keep their usual names.

    >>> Objects().text_of(Objects)
    'turnwise.trainer.objects:Objects'
    """

    def __init__(self) -> None:
        self._by_text: dict[str, Any] = {}

    def text_of(self, value: Any) -> str:
        """The string that stands for a class, a function, another callable, a tool, or rows. Remembers it for
        `install`."""
        definition = _definition(value)
        name = definition.__name__
        if isinstance(value, MethodType):
            name = f"{_owner(value).__name__}.{name}"
        name = _identifier(name)
        module = _identifier(definition.__module__ or "")
        is_ours = module.startswith("turnwise.") and definition is value
        if is_ours and vars(sys.modules[module]).get(name) is value:
            return f"{module}:{name}"
        first = f"{OBJECT_PREFIX}{_digest(value)}.{module}:{name}"
        text = first
        number = 1
        while self._by_text.setdefault(text, value) is not value:  # for example closures of one function
            number += 1
            text = f"{first}_{number}"
        return text

    def install(self) -> None:
        """Puts the objects into their modules. Each run calls this, since another Trainer may have replaced
        objects there."""
        for text, value in self._by_text.items():
            module_name, _, name = text.partition(":")
            module = sys.modules.setdefault(module_name, ModuleType(module_name))
            vars(module)[name] = value


def _identifier(text: str) -> str:
    """The text if it is a dotted name, else `nameless`, as for a lambda."""
    if all(part.isidentifier() for part in text.split(".")):
        return text
    return "nameless"


def _digest(value: Any) -> str:
    """A hash of rows, or of a callable's or tool's source and the plain values in its closure, attributes,
    bound arguments."""
    match value:
        case type():
            parts = [_source(value)]
        case FunctionType():
            cells = value.__closure__ or ()
            # An empty cell has no contents.
            contents = [cell.cell_contents for cell in cells if cell != CellType()]
            parts = [_source(value), *_plain(enumerate(contents))]
        case MethodType():
            parts = [value.__name__, _source(_owner(value)), *_plain(_attributes(value.__self__))]
        case partial():
            arguments = [*enumerate(value.args), *value.keywords.items()]
            parts = [_digest(value.func), *_plain(arguments)]
        case _ if callable(value):
            definition = _definition(value)
            is_function = isinstance(definition, FunctionType)
            text = _digest(definition) if is_function else _source(definition)
            parts = [text, *_plain(_attributes(value))]
        case Tool():
            parts = [_source(type(value)), *_plain(_attributes(value))]
        case _:
            parts = [repr(row) for row in value]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _definition(value: Any) -> Any:
    """The object whose name and source stand for the value: the value, the function that it wraps (a cache),
    or its class."""
    match value:
        case type() | FunctionType() | MethodType() | BuiltinFunctionType():
            return value
        case object(__wrapped__=FunctionType() as wrapped):
            return wrapped
    return type(value)


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    try:
        return vars(value).items()
    except TypeError:  # it has slots
        return ()


def _owner(method: MethodType) -> type:
    if isinstance(method.__self__, type):
        return method.__self__
    return type(method.__self__)


def _plain(values: Iterable[tuple[Any, Any]]) -> list[str]:
    """`key=repr` for the values whose repr is the same in every process."""
    return [f"{key}={value!r}" for key, value in values if isinstance(value, bool | int | float | str | None)]


def _source(value: Any) -> str:
    """The source, or a text made from the code if there is none, as for a notebook's classes before Python
    3.13."""
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        if isinstance(value, FunctionType):
            return hashlib.sha256(marshal.dumps(value.__code__)).hexdigest()
        class_ = value if isinstance(value, type) else type(value)
        lines = []
        for key, member in vars(class_).items():
            if isinstance(member, FunctionType):
                lines.append(_source(member))
            elif isinstance(member, str | int | float | tuple):  # reads the same in every process
                lines.append(f"{key}={member!r}")
        return "\n".join(lines)


def plain_values(value: Any, objects: Objects, key: str) -> Any:
    """The value in types that YAML has, with classes and callables as strings. Raises ConfigError for any
    other object."""
    match value:
        case None | bool():
            return value
        case float():  # numpy's float64 and members of enums are subclasses, which no YAML file holds
            return float(value)
        case int():
            return int(value)
        case str():
            return str.__str__(value)
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
    hint = ""
    if key.startswith("custom_envs."):
        hint = (
            " An environment is given by its class, and its arguments by "
            f"env={{'{kind}': {{'env_type': {kind}, 'env_config': {{…}}}}"
        )
    raise ConfigError(
        f"{key}: got {str(value)[:60]!r}, an instance of {kind}; a setting is a number, a string, a list, a "
        f"dict, a class or a function.{hint}"
    )


def custom_envs(env: Any) -> dict[str, Any]:
    """The section `custom_envs` of one environment (a class, a string, or a section with `env_type`) or of
    several by tag."""
    if not isinstance(env, Mapping) or "env_type" in env:
        env_type = env["env_type"] if isinstance(env, Mapping) else env
        if isinstance(env_type, type):
            name = env_type.__name__
        elif isinstance(env_type, str):
            name = str(env_type)
        else:
            name = type(env_type).__name__
        env = {name.rpartition(":")[2]: env}
    sections = {}
    for tag, section in env.items():
        if not isinstance(section, Mapping):
            section = {"env_type": section}
        sections[tag] = section
    return sections


def data_section(
    train_dataset: Any,
    eval_dataset: Any,
    rewards: Any,
    reward_weights: Sequence[float] | None,
    objects: Objects,
) -> dict[str, Any]:
    """The section `data`. Raises ConfigError for wrong types, or if there aren't as many weights as
    rewards."""
    section: dict[str, Any] = {}
    if train_dataset is not None:
        section["train_files"] = _files(train_dataset, objects)
    if eval_dataset is not None:
        section["val_files"] = _files(eval_dataset, objects)
    if rewards is not None:
        section["reward"] = _reward_entries(rewards, reward_weights)
    elif reward_weights is not None:
        raise ConfigError(
            "reward_weights: there are no reward_funcs that they could weigh; add those, or remove this"
        )
    return section


def _reward_entries(rewards: Any, weights: Sequence[float] | None) -> list[dict[str, Any]]:
    """The entries of `data.reward`, from functions, names, entries with `name`, or a mapping of names to
    weights."""
    if isinstance(rewards, Mapping) and "name" not in rewards:
        entries = [{"name": name, "weight": weight} for name, weight in rewards.items()]
    else:
        entries = []
        for reward in _as_list(rewards):
            entries.append(dict(reward) if isinstance(reward, Mapping) else {"name": reward})
    if weights is None:
        return [{"weight": 1.0, **entry} for entry in entries]
    if not isinstance(weights, Collection) or not all(isinstance(weight, Real) for weight in weights):
        raise ConfigError(f"reward_weights: got {weights!r}; give one number for each of the reward_funcs")
    if len(weights) != len(entries):
        raise ConfigError(
            f"reward_weights: {len(weights)} weights for {len(entries)} reward_funcs; give one for each"
        )
    if any("weight" in entry for entry in entries):
        raise ConfigError("reward_weights: a reward has a weight of its own already; remove one of the two")
    return [{**entry, "weight": float(weight)} for entry, weight in zip(entries, weights, strict=True)]


def tool_names(tools: Any, objects: Objects) -> list[str]:
    """The strings that stand for tools: functions, objects or classes with the methods of `protocols.Tool`,
    or names. Raises ConfigError for anything else."""
    names = []
    for tool in _as_list(tools):
        if isinstance(tool, str):
            names.append(tool)
        elif isinstance(tool, Tool) or callable(tool):
            names.append(objects.text_of(tool))
        else:
            raise ConfigError(
                f"tools: got {str(tool)[:60]!r}, a {type(tool).__name__}; it is a list of tools, and a tool "
                "is a function with type hints and a docstring, or an object with schema, create, execute, "
                "calc_reward and release (docs/tools.md)"
            )
    return names


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _files(rows: Any, objects: Objects) -> list[str]:
    """The names of files or hub data sets; for rows, one string that stands for them."""
    if isinstance(rows, str | Path):
        return [str(rows)]
    if isinstance(rows, list | tuple) and rows and all(isinstance(name, str | Path) for name in rows):
        return [str(name) for name in rows]
    rows = listed(rows)
    if not isinstance(rows, Iterable):
        raise ConfigError(
            f"a data set is a list of dicts, a datasets.Dataset or names of files; got {type(rows).__name__}"
        )
    if isinstance(rows, Iterator):
        rows = list(rows)
    return [objects.text_of(rows)]
