"""Finds the rows that an action of the tool works on, converts them for SFT or RL, and examines them."""

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from turnwise.chat.demonstration import check_row_flags
from turnwise.data.answers import answer_of
from turnwise.data.demonstrations import message_problem
from turnwise.data.forms import as_demonstration, as_task, form_of
from turnwise.data.gsm8k import GENERATED, HUB_NAME, generate_problems, local_files, rl_row, sft_row
from turnwise.data.prompts import tools_of, with_plain_messages
from turnwise.data.tables import TableRow, listed, python_rows, read_tables
from turnwise.errors import ConfigError, DataError, NotAvailableError, nearest
from turnwise.model_files.hub import local_path
from turnwise.rl_tool.parameters import RowChoice

NUM_GENERATED = 1000
_CONNECT_S = 3.0
LONGEST = 2048
"""A row of more tokens than this counts as over-long."""
_FORMATS: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {"sft": sft_row, "rl": rl_row}
_READ = ("question", "answer", "prompt", "completion", "messages", "ground_truth")
"""The columns that the tool may read. Their values must not be null."""


class LoadedRows(NamedTuple):
    """The rows of a data set."""

    name: str
    """The name of the data set."""
    rows: list[dict[str, Any]]
    """The rows as SFT or RL needs them."""
    columns: list[Mapping[str, Any]]
    """The rows as they were read."""


def load(
    choice: RowChoice,
    kind: str,
    registered: Mapping[str, Any],
    split: str = "train",
    number: int | None = None,
    takes_null: bool = False,
) -> LoadedRows:
    """The rows of `choice`, in the form for `kind` (sft or rl). `split` and `number` (None = all, or 1,000
    generated ones) apply where `choice` sets none. Raises ConfigError if the data set is unknown, or has no
    splits and `choice` sets one; DataError if there are no rows, or a row lacks columns, has wrong messages
    or (unless `takes_null`) a null in `_READ`."""
    number = choice.max_samples or number
    name, found = _find(choice, choice.split or split, number, registered)
    for row in () if takes_null else found[:number]:
        if null := [column for column in _READ if row.columns.get(column, "") is None]:
            raise DataError(f"{row.place}: {null[0]} is null; fill it in, or leave this row out")
    rows = [{**_made(row, kind), "data_source": name} for row in found[:number]]
    rows = [with_plain_messages(row, tools_of(row)) if not _problem(row) else row for row in rows]
    for row, made in zip(found, rows, strict=False):
        if problem := _problem(made):
            raise DataError(
                f"{row.place}: {problem}; a prompt is a text, or a list of messages with role and content"
            )
    if not rows:
        raise DataError(f"dataset {name} has no rows; name one with at least one row")
    return LoadedRows(name, rows, [row.columns for row in found[:number]])


def _made(row: TableRow, kind: str) -> dict[str, Any]:
    """The row as SFT or RL needs it. Raises DataError, which names the row, if it has no known form."""
    if kind == "sft":
        _check_flags(row)
    form = None if "messages" in row.columns or "prompt" in row.columns else form_of(row.columns)
    if form not in ("sharegpt", "alpaca"):
        return _FORMATS[kind](row.columns, row.place)
    try:
        return as_demonstration(row.columns, form) if kind == "sft" else as_task(row.columns, form)
    except DataError as fault:
        raise DataError(f"{row.place} {fault}") from fault


def _check_flags(row: TableRow) -> None:
    try:
        check_row_flags(row.columns)
    except DataError as fault:
        raise DataError(f"{row.place}: {fault}") from fault


def _problem(row: Mapping[str, Any]) -> str:
    """Why the conversation of a row can't be read; "" if it can. Null texts count as empty ones."""
    messages = row.get("messages", row.get("prompt"))
    if "messages" not in row and isinstance(messages, str | None):
        return ""
    if not isinstance(messages, list) or not messages:
        return f"has {str(messages)[:40]!r} for its messages"
    told = (
        {**m, "content": "" if m.get("content") is None else m["content"]} if isinstance(m, dict) else m
        for m in messages
    )
    return next(filter(None, (message_problem(index, message) for index, message in enumerate(told))), "")


def require_truths(loaded: LoadedRows, columns: Sequence[str]) -> None:
    """Raises DataError if a row has none of these columns, which hold true answers."""
    for number, row in enumerate(loaded.rows, start=1):
        if not any(column in row for column in columns):
            raise DataError(
                f"dataset {loaded.name}, row {number} has no column {' or '.join(columns)}, with which "
                f"answers are compared; "
                "add it"
            )


def _find(
    choice: RowChoice, split: str, number: int | None, registered: Mapping[str, Any]
) -> tuple[str, Sequence[TableRow]]:
    asked = choice.dataset
    is_python = asked is not None and not isinstance(asked, str | Path)
    if choice.split and (is_python or (isinstance(asked, str) and asked in registered)):
        raise ConfigError(
            "split: rows given in Python have none; leave split out, or give the rows of the split"
        )
    if isinstance(asked, str) and asked in registered:
        return asked, _of_python(registered[asked], asked)
    if asked is None or asked == "gsm8k":
        files = local_files(split) or [f"{HUB_NAME}:{split}"]
        rows = (
            _tables(files[0])
            if asked is None and files[0].startswith(HUB_NAME)
            else read_tables(files, "dataset")
        )
        if rows:
            return "gsm8k", rows
        asked = GENERATED
    if asked == GENERATED:
        return GENERATED, _of_python(generate_problems(number or NUM_GENERATED, split), GENERATED)
    if is_python:
        return "python", _of_python(asked, "dataset")
    path = local_path(asked)
    files = local_files(split, path) if path.is_dir() else []
    if not files and choice.split and not path.is_dir():
        raise ConfigError(f"split: {asked} has none; leave split out, or name a folder with {split}.jsonl")
    if not files and not path.exists() and "/" not in str(asked) and "." not in str(asked):
        known = ["gsm8k", GENERATED, *registered]
        raise ConfigError(
            f"dataset {asked!r} isn't one of {', '.join(known)}, a file or a "
            f"folder.{nearest(str(asked), known)}"
        )
    return Path(asked).name, read_tables(files or [str(asked)], "dataset")


@lru_cache(maxsize=4)
def _tables(name: str) -> list[TableRow]:
    """The rows of a data set on the hub; [] if they can't be read. Cached, since the hub's retries take half
    a minute."""
    from huggingface_hub.constants import ENDPOINT

    try:
        if "https" not in getproxies():
            socket.create_connection((urlsplit(ENDPOINT).hostname or "", 443), timeout=_CONNECT_S).close()
        return read_tables([name], "dataset")
    except (DataError, NotAvailableError, OSError):
        return []


def _of_python(rows: Any, name: str) -> list[TableRow]:
    rows = listed(rows)
    if not isinstance(rows, Iterable):
        raise ConfigError(f"dataset: got a {type(rows).__name__}; it is a name, a file, or a list of dicts")
    found = python_rows(rows, name)
    if bad := [row.fault for row in found if row.fault]:
        raise DataError(bad[0])
    return found


def formatted(row: Mapping[str, Any]) -> str:
    """A row as plain text: its messages with their roles, and the true answer if it has one."""
    messages = row.get("messages") or row.get("prompt") or ""
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    text = "\n".join(f"{message['role']}: {message.get('content')}" for message in messages)
    return f"{text}\n(true answer: {row['ground_truth']})" if "ground_truth" in row else text


def _contents(row: Mapping[str, Any]) -> list[Any]:
    """The contents of a row's messages; [] if it has none. RL doesn't read the column `messages`, which may
    hold anything."""
    messages = row.get("messages")
    return (
        [m.get("content") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    )


def quality(loaded: LoadedRows, count_tokens: Callable[[str], int] | None = None) -> dict[str, int]:
    """Counts rows with an empty value, rows with a null, copies of earlier rows, rows of over `LONGEST`
    tokens (without `count_tokens`, four characters are a token), and rows whose true answer has no number."""
    texts = [formatted(row) for row in loaded.rows]
    lengths = [count_tokens(text) if count_tokens else len(text) // 4 for text in texts]
    values = [[*row.values(), *_contents(row)] for row in loaded.columns]
    truths = [row.get("ground_truth", (_contents(row) or [""])[-1]) for row in loaded.rows]
    copies = Counter(json.dumps(row, sort_keys=True, default=str) for row in loaded.rows)
    return {
        "empty": sum(
            any(isinstance(value, str) and not value.strip() for value in of_row) for of_row in values
        ),
        "null": sum(any(value is None for value in of_row) for of_row in values),
        "duplicate": sum(number - 1 for number in copies.values()),
        "over_long": sum(length > LONGEST for length in lengths),
        "answer_not_extractable": sum(answer_of(str(truth)) is None for truth in truths),
    }
