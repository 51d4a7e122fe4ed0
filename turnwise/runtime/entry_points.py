"""Imports the object that `module:name` names: a class, a function or another object."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from turnwise.errors import TurnwiseError, nearest
from turnwise.runtime.call_board import CALLS
from turnwise.runtime.published_modules import published_modules

T = TypeVar("T")

OBJECT_PREFIX = "object_"
"""Beginning of the entry point of an object that was passed to a Trainer: `object_<hash of the
object>.<module>:<name>`."""


def load_class(entry_point: str, key: str, error: type[TurnwiseError]) -> type:
    """The class that an entry point names. If there is none, raises `error` with a message that names the
    setting `key`.

    >>> load_class("collections:OrderedDict", "env_type", TurnwiseError).__name__
    'OrderedDict'
    """
    return _load(entry_point, key, error, type, "class", "classes")


def load_function(
    entry_point: str,
    key: str,
    error: type[TurnwiseError],
    arguments: Iterable[str],
    keywords: Iterable[str] = (),
) -> Callable[..., Any]:
    """The function that an entry point names. Raises `error` if there is none, or if it can't be called with
    positional `arguments` and `keywords`.

    >>> load_function("textwrap:dedent", "pg_variant", TurnwiseError, ["text"])("  a")
    'a'
    """
    function = _load(entry_point, key, error, FunctionType, "function", "functions")
    try:
        inspect.signature(function).bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as fault:
        form = ", ".join([*arguments, *(f"{name}=…" for name in keywords)])
        raise error(f"{key} {entry_point!r}: {fault}; it is called as {function.__name__}({form})") from fault
    return function


def load_object(entry_point: str, key: str, error: type[TurnwiseError]) -> Any:
    """The object, of any kind, that an entry point names. Raises `error` as `load_class` does."""
    return _load(entry_point, key, error, object, "object", "names")


def _load(
    entry_point: str,
    key: str,
    error: type[TurnwiseError],
    kind: type[T],
    noun: str,
    nouns: str,
) -> T:
    module_name, _, name = entry_point.partition(":")
    label = f"{key} {entry_point!r}"
    if not module_name or not name:
        form = noun.capitalize() if kind is type else noun
        raise error(f"{label} must be 'module:{form}'")
    if module_name.startswith(OBJECT_PREFIX) and module_name not in sys.modules:
        _, _, module_of_object = module_name.partition(".")
        raise error(
            f"{label} stands for {module_of_object}:{name}, a Python object that was passed to a Trainer; "
            "continue there, with the object and Trainer(…, resume_from_checkpoint=True), or put it into a "
            "module and name it as module:name"
        )
    line = CALLS.begin(f"importing {module_name}")
    try:
        with published_modules():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as fault:  # boundary: a user's module may raise anything
        if isinstance(fault, ModuleNotFoundError) and _holds(fault.name, module_name):
            raise error(
                f"{label}: no module {fault.name!r} on Python's path; the `turnwise` command looks in the "
                "config's folder and the working directory too, other programs need PYTHONPATH=. or the "
                "package that holds it"
            ) from fault
        place = traceback.extract_tb(fault.__traceback__)[-1]
        raise error(
            f"{label}: importing {module_name} failed with {type(fault).__name__}: {fault} "
            f"({place.filename}, line {place.lineno}); fix it, or name another {noun}"
        ) from fault
    finally:
        CALLS.end(line)
    value = vars(module).get(name)
    if name not in vars(module) or not isinstance(value, kind):
        names = _public_names(module, module_name, kind)
        raise error(
            f"{label}: {module_name} has no {noun} {name!r}; its {nouns} are "
            f"{', '.join(names) or 'none'}.{nearest(name, names)}"
        )
    return value


def _holds(package: str | None, module_name: str) -> bool:
    """Whether a missing package is the module itself, or one that the module lies in."""
    return bool(package) and f"{module_name}.".startswith(f"{package}.")


def _public_names(module: ModuleType, module_name: str, kind: type) -> list[str]:
    """The names of a module's own classes or functions; for `object`, of everything in it."""
    names: list[str] = []
    for name, value in vars(module).items():
        if name.startswith("_") or not isinstance(value, kind):
            continue
        if kind is object or value.__module__ == module_name:
            names.append(name)
    return names
