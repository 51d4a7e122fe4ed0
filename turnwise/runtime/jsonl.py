"""Reads JSONL files, one JSON object per line, and reports every fault with file and line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.errors import DataError


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields `(place, object)` of each line that isn't blank; the place is `FILE, line N`. Raises DataError
    for a fault."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a JSONL file in it")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield place, _object(line, place)
    except FileNotFoundError as fault:
        raise DataError(f"{path}: no such file") from fault
    except OSError as fault:
        raise DataError(f"{path} can't be read: {fault.strerror}") from fault


def not_utf8(fault: UnicodeDecodeError) -> str:
    """Returns the rest of an error message that begins with the file's name: which line isn't UTF-8."""
    number = fault.object.count(b"\n", 0, fault.start) + 1
    return f", line {number} isn't UTF-8 (byte 0x{fault.object[fault.start]:02x}); save the file as UTF-8"


def half_character(fault: UnicodeEncodeError) -> str:
    """Returns the rest of an error message that begins with the place of a text: half of a surrogate pair is
    in the text."""
    return f"holds {fault.object[fault.start]!a}, half a character, which no tokenizer reads; write it again"


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
        if b"\\ud" in line.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as fault:
        raise DataError(
            f"{place} isn't UTF-8 (byte 0x{line[fault.start]:02x}); save the file as UTF-8"
        ) from fault
    except UnicodeEncodeError as fault:
        raise DataError(f"{place} {half_character(fault)}") from fault
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{place} isn't JSON ({fault})") from fault
    if not isinstance(value, dict):
        raise DataError(f"{place} is {json.dumps(value)[:40]}; a line is a JSON object, {{...}}")
    return value
