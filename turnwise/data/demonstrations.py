"""Demonstrations for supervised fine-tuning: JSONL files, a row `{"messages": [...]}` each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from turnwise.errors import DataError
from turnwise.types import Message

_FORM = (
    'expected a JSON object a line: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)


def read_demonstrations(paths: Sequence[str | Path]) -> list[list[Message]]:
    """The message lists of all rows of the files, in their order.

    Raises:
        DataError: a file that is missing or empty, or a row of another form; the message names file and line.
    """
    rows: list[list[Message]] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(f"{path}: no such file; train_files and val_files name JSONL files of messages")
        before = len(rows)
        with path.open(encoding="utf-8") as file:
            rows += [_row(line, f"{path}, line {number}") for number, line in enumerate(file, start=1) if line.strip()]
        if len(rows) == before:
            raise DataError(f"{path}: is empty; {_FORM}")
    return rows


def _row(line: str, where: str) -> list[Message]:
    try:
        record = json.loads(line)
    except ValueError as fault:
        raise DataError(f"{where}: is no JSON ({fault}); {_FORM}") from fault
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
        raise DataError(f"{where}: got {line.strip()[:80]}; {_FORM}")
    return messages


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
