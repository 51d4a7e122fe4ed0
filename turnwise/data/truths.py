"""Checks the true answers of a data set's rows before a model is loaded."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from turnwise.errors import ConfigError, DataError

F = TypeVar("F", bound=Callable[..., Any])


def needs_truth(*columns: str) -> Callable[[F], F]:
    """A decorator of a reward function that compares with the first of these columns that a row has: each row
    must have a number or a text there (`check_truth`). It sets the function's `check_row`
    (`protocols.ChecksRows`).

    >>> @needs_truth("answer")
    ... def score(completions, answer): ...
    >>> score.check_row({"answer": 72})
    """

    def marked(function: F) -> F:
        function.check_row = lambda row: check_truth(row, columns)  # type: ignore[attr-defined]
        return function

    return marked


def given_truths(*columns: Sequence[Any] | None) -> Sequence[Any]:
    """The first of the columns that was given. Raises ConfigError if none was."""
    for column in columns:
        if column is not None:
            return column
    raise ConfigError(
        "the rows have no column ground_truth or answer, with which this reward compares; add one"
    )


def check_truth(row: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Raises DataError if the row has none of the columns, or one of them isn't a finite number or a text
    that isn't blank."""
    there = [column for column in columns if row.get(column) is not None]
    if not there:
        raise DataError(
            f"the row has no column {' or '.join(columns)} to compare with (null is none); add one"
        )
    for column in there:
        problem = _problem(row[column])
        if problem:
            raise DataError(
                f"the column {column!r} is {problem}; this reward compares with a number or a text"
            )


def _problem(truth: Any) -> str:
    if isinstance(truth, bool) or not isinstance(truth, int | float | str):
        return f"{str(truth)[:60]}, a {type(truth).__name__}"
    if isinstance(truth, str):
        return "" if truth.strip() else f"the blank text {truth[:20]!r}"
    return "" if math.isfinite(truth) else str(truth)
