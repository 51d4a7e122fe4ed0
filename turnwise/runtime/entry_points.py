"""Imports the object that `module:name` names: a class, a function or another object."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar

from turnwise.errors import TurnwiseError, nearest
from turnwise.runtime.call_board import CALLS

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
    named: Iterable[str] = (),
) -> Callable[..., Any]:
    """The function that an entry point names. Raises `error` if there is none, or if it can't be called with
    positional `arguments` and keywords `named`.

    >>> load_function("textwrap:dedent", "pg_variant", TurnwiseError, ["text"])("  a")
    'a'
    """
    found = _load(entry_point, key, error, FunctionType, "function", "functions")
    try:
        inspect.signature(found).bind(*arguments, **dict.fromkeys(named))
    except TypeError as fault:
        form = ", ".join([*arguments, *(f"{name}=…" for name in named)])
        raise error(f"{key} {entry_point!r}: {fault}; it is called as {found.__name__}({form})") from fault
    return found


def load_object(entry_point: str, key: str, error: type[TurnwiseError]) -> Any:
    """The object, of any kind, that an entry point names. Raises `error` as `load_class` does."""
    return _load(entry_point, key, error, object, "object", "names")


def _load(entry_point: str, key: str, error: type[TurnwiseError], kind: type[T], noun: str, nouns: str) -> T:
    module_name, _, name = entry_point.partition(":")
    if not module_name or not name:
        raise error(f"{key} {entry_point!r} must be 'module:{noun.capitalize() if kind is type else noun}'")
    if module_name.startswith(OBJECT_PREFIX) and module_name not in sys.modules:
        origin = f"{module_name.partition('.')[2]}:{name}"
        raise error(
            f"{key} {entry_point!r} stands for {origin}, a Python object that was passed to a Trainer; "
            f"continue there, with "
            f"the object and Trainer(…, resume_from_checkpoint=True), or put it into a module and name it "
            f"as module:name"
        )
    line = CALLS.begin(f"importing {module_name}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as fault:  # boundary: a user's module may raise anything
        if (
            isinstance(fault, ModuleNotFoundError)
            and fault.name
            and f"{module_name}.".startswith(f"{fault.name}.")
        ):
            raise error(
                f"{key} {entry_point!r}: no module {fault.name!r} on Python's path; the `turnwise` command "
                f"looks in the "
                "config's folder and the working directory too, other programs need PYTHONPATH=. or the "
                "package that holds it"
            ) from fault
        where = traceback.extract_tb(fault.__traceback__)[-1]
        raise error(
            f"{key} {entry_point!r}: importing {module_name} failed with {type(fault).__name__}: {fault} "
            f"({where.filename}, line {where.lineno}); fix it, or name another {noun}"
        ) from fault
    finally:
        CALLS.end(line)
    names = vars(module)
    found = names.get(name)
    if name not in names or not isinstance(found, kind):
        public = {
            other: value
            for other, value in names.items()
            if not other.startswith("_") and isinstance(value, kind)
        }
        own = [other for other, value in public.items() if kind is object or value.__module__ == module_name]
        raise error(
            f"{key} {entry_point!r}: {module_name} has no {noun} {name!r}; its {nouns} are "
            f"{', '.join(own) or 'none'}.{nearest(name, own)}"
        )
    return found
