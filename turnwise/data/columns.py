"""Columns of rows as the arguments of functions: under their own names, nested ones also by their last part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.data.tables import TableRow
from turnwise.errors import DataError, nearest


def leaves(columns: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """`(path, value)` of every column, and of everything in nested ones but `tools_kwargs`, which are for tools."""
    for name, value in columns.items():
        yield (*path, str(name)), value
        if isinstance(value, Mapping) and name != "tools_kwargs":
            yield from leaves(value, (*path, str(name)))


def arguments_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Name → value. A name that two columns have is the one of fewer levels, or none where both have as many.

    >>> arguments_of({"prompt": "2+2", "reward_model": {"ground_truth": "4"}})["ground_truth"]
    '4'
    """
    found: dict[str, Any] = {}
    doubled = clashes(columns)
    for path, value in leaves(columns):
        if len(path) == 1 or path[-1] not in doubled:
            found.setdefault(path[-1], value)
    return found


def clashes(columns: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names that several columns have → their dotted paths."""
    paths: dict[str, list[str]] = {}
    for path, _ in leaves(columns):
        paths.setdefault(path[-1], []).append(".".join(path))
    return {name: found for name, found in paths.items() if len(found) > 1}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The columns that a function asks for by its parameters."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    takes_all: bool = False
    """It has `**columns`."""

    @classmethod
    def by(cls, function: Callable[..., Any], given: Sequence[str]) -> Wanted:
        """The parameters that aren't `given` in another way."""
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.name not in given and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            tuple(p.name for p in named if p.default is p.empty),
            tuple(p.name for p in named if p.default is not p.empty),
            any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def choose(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for one row."""
        found = arguments_of(columns)
        if self.takes_all:
            return found
        return {name: found[name] for name in (*self.required, *self.optional) if name in found}

    def check(self, rows: Sequence[TableRow], what: str) -> None:
        """Raises:
        DataError: a row lacks a column, or has two of that name; the message names its place.
        """
        for row in rows:
            found = arguments_of(row.columns)
            doubled = clashes(row.columns)
            for name in doubled if self.takes_all else [*self.required, *self.optional]:
                if name in doubled:
                    raise DataError(
                        f"{row.place}: {what} gets the column {name!r}, and the row has it twice: "
                        f"{' and '.join(doubled[name])}; rename one of them"
                    )
            for name in self.required:
                if name not in found:
                    known = ", ".join(sorted(found)) or "none"
                    raise DataError(
                        f"{row.place}: {what} needs the column {name!r}, and the row has {known}.{nearest(name, found)}"
                    )
