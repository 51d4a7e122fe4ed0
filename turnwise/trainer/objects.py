"""Objects of Python that a config names: each under a text that says its module, its name and the hash of its source."""

from __future__ import annotations

import hashlib
import inspect
import marshal
import sys
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from turnwise.entry_points import OBJECT_PREFIX


class Objects:
    """The objects of one Trainer by the texts that stand for them, `object_<hash>.<module>:<name>`.

    The text is a `module:Class` like any other once the objects are installed, in modules of their own. What belongs to
    turnwise itself is named as everywhere.

    >>> Objects().text_of(Objects)
    'turnwise.trainer.objects:Objects'
    """

    def __init__(self) -> None:
        self._by_text: dict[str, Any] = {}

    def text_of(self, value: Any) -> str:
        """The text that stands from now on for a class, a function or another callable, or rows."""
        named = value if isinstance(value, type | FunctionType) else type(value)
        module, name = (_identifier(part) for part in (named.__module__, named.__name__))
        if module.startswith("turnwise.") and named is value and vars(sys.modules[module]).get(name) is value:
            return f"{module}:{name}"
        first = text = f"{OBJECT_PREFIX}{_digest(value)}.{module}:{name}"
        number = 1
        while self._by_text.setdefault(text, value) is not value:  # closures of one function, say
            number += 1
            text = f"{first}_{number}"
        return text

    def install(self) -> None:
        """Puts the objects where their texts are looked for. A Trainer does so before each run: another one may have objects
        of the same texts."""
        for text, value in self._by_text.items():
            module, _, name = text.partition(":")
            vars(sys.modules.setdefault(module, ModuleType(module)))[name] = value


def _identifier(text: str) -> str:
    """The text as a dotted name: the `<lambda>` of a function has none of its own."""
    return text if all(part.isidentifier() for part in text.split(".")) else "nameless"


def _digest(value: Any) -> str:
    """The hash of what was written of it: of source, or of rows."""
    if isinstance(value, partial):
        parts = [_source(value.func), repr(value.args), repr(value.keywords)]
    elif isinstance(value, type | FunctionType):
        parts = [_source(value)]
    else:
        parts = [_source(type(value))] if callable(value) else [repr(row) for row in value]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _source(value: Any) -> str:
    """The source, or the code where there is none. Of a class in a notebook only its functions have one before Python 3.13."""
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        if isinstance(value, FunctionType):
            return hashlib.sha256(marshal.dumps(value.__code__)).hexdigest()
        members = vars(value if isinstance(value, type) else type(value)).items()
        return "\n".join(_source(v) if isinstance(v, FunctionType) else f"{k}={v!r}" for k, v in members if _is_told(v))


def _is_told(member: Any) -> bool:
    """Whether this part of a class reads the same in every process, so that it belongs in the hash."""
    return isinstance(member, FunctionType | str | int | float | tuple)
