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
    name, table = _find(choice, choice.split or split, number, registered)
    table = table[:number]
    if not takes_null:
        for row in table:
            _check_nulls(row)
    rows = [{**_converted(row, kind), "data_source": name} for row in table]
    rows = [row if _problem(row) else with_plain_messages(row, tools_of(row)) for row in rows]
    for row, converted in zip(table, rows, strict=True):
        problem = _problem(converted)
        if problem:
            raise DataError(
                f"{row.place}: {problem}; a prompt is a text, or a list of messages with role and content"
            )
    if not rows:
        raise DataError(f"dataset {name} has no rows; name one with at least one row")
    return LoadedRows(name, rows, [row.columns for row in table])


def _check_nulls(row: TableRow) -> None:
    for column in _READ:
        if row.columns.get(column, "") is None:
            raise DataError(f"{row.place}: {column} is null; fill it in, or remove this row")


def _converted(row: TableRow, kind: str) -> dict[str, Any]:
    """The row as SFT or RL needs it. Raises DataError, which names the row, if it has no known form."""
    if kind == "sft":
        _check_flags(row)
    form = None
    if "messages" not in row.columns and "prompt" not in row.columns:
        form = form_of(row.columns)
    if form not in ("sharegpt", "alpaca"):
        return _FORMATS[kind](row.columns, row.place)
    try:
        if kind == "sft":
            return as_demonstration(row.columns, form)
        return as_task(row.columns, form)
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
    for index, message in enumerate(messages):
        if isinstance(message, dict) and message.get("content") is None:
            message = {**message, "content": ""}
        problem = message_problem(index, message)
        if problem:
            return problem
    return ""


def require_truths(loaded: LoadedRows, columns: Sequence[str]) -> None:
    """Raises DataError if a row has none of these columns, which hold true answers."""
    for number, row in enumerate(loaded.rows, start=1):
        if not any(column in row for column in columns):
            raise DataError(
                f"dataset {loaded.name}, row {number} has no column {' or '.join(columns)}, with which "
                "answers are compared; add it"
            )


def _find(
    choice: RowChoice,
    split: str,
    number: int | None,
    registered: Mapping[str, Any],
) -> tuple[str, Sequence[TableRow]]:
    dataset = choice.dataset
    is_registered = isinstance(dataset, str) and dataset in registered
    is_python = dataset is not None and not isinstance(dataset, str | Path)
    if choice.split and (is_python or is_registered):
        raise ConfigError(
            "split: rows given in Python have none; remove split, or give the rows of the split"
        )
    if is_registered:
        return dataset, _of_python(registered[dataset], dataset)
    if dataset is None or dataset == "gsm8k":
        rows = _gsm8k(split, may_miss=dataset is None)
        if rows:
            return "gsm8k", rows
        dataset = GENERATED
    if dataset == GENERATED:
        return GENERATED, _of_python(generate_problems(number or NUM_GENERATED, split), GENERATED)
    if is_python:
        return "python", _of_python(dataset, "dataset")
    path = local_path(dataset)
    files = []
    if path.is_dir():
        files = local_files(split, path)
    elif choice.split:
        raise ConfigError(f"split: {dataset} has none; remove split, or name a folder with {split}.jsonl")
    elif not path.exists() and "/" not in str(dataset) and "." not in str(dataset):
        names = ["gsm8k", GENERATED, *registered]
        raise ConfigError(
            f"dataset {dataset!r} isn't one of {', '.join(names)}, a file or a "
            f"folder.{nearest(str(dataset), names)}"
        )
    return Path(dataset).name, read_tables(files or [str(dataset)], "dataset")


def _gsm8k(split: str, may_miss: bool) -> Sequence[TableRow]:
    """The rows in one of its local folders, else those on the hub; with `may_miss`, [] if these can't be
    read."""
    files = local_files(split)
    if files:
        return read_tables(files, "dataset")
    name = f"{HUB_NAME}:{split}"
    if may_miss:
        return _tables(name)
    return read_tables([name], "dataset")


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
    table = python_rows(rows, name)
    for row in table:
        if row.fault:
            raise DataError(row.fault)
    return table


def formatted(row: Mapping[str, Any]) -> str:
    """A row as plain text: its messages with their roles, and the true answer if it has one."""
    messages = row.get("messages") or row.get("prompt") or ""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    lines = [f"{message['role']}: {message.get('content')}" for message in messages]
    if "ground_truth" in row:
        lines.append(f"(true answer: {row['ground_truth']})")
    return "\n".join(lines)


def _contents(row: Mapping[str, Any]) -> list[Any]:
    """The contents of a row's messages; [] if it has none. RL doesn't read the column `messages`, which may
    hold anything."""
    messages = row.get("messages")
    if not isinstance(messages, list):
        return []
    return [message.get("content") for message in messages if isinstance(message, Mapping)]


def quality(loaded: LoadedRows, count_tokens: Callable[[str], int] | None = None) -> dict[str, int]:
    """Counts rows with an empty value, rows with a null, copies of earlier rows, rows of over `LONGEST`
    tokens (without `count_tokens`, four characters are a token), and rows whose true answer has no number."""
    texts = [formatted(row) for row in loaded.rows]
    if count_tokens is None:
        lengths = [len(text) // 4 for text in texts]
    else:
        lengths = [count_tokens(text) for text in texts]
    values = [[*row.values(), *_contents(row)] for row in loaded.columns]
    copies = Counter(
        json.dumps(
            row,
            sort_keys=True,
            default=str,
        )
        for row in loaded.rows
    )
    return {
        "empty": sum(any(map(_is_blank, row_values)) for row_values in values),
        "null": sum(any(value is None for value in row_values) for row_values in values),
        "duplicate": sum(number - 1 for number in copies.values()),
        "over_long": sum(length > LONGEST for length in lengths),
        "answer_not_extractable": sum(answer_of(_true_answer(row)) is None for row in loaded.rows),
    }


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _true_answer(row: Mapping[str, Any]) -> str:
    """The row's true answer, else its last message."""
    if "ground_truth" in row:
        return str(row["ground_truth"])
    contents = _contents(row)
    return str(contents[-1]) if contents else ""
