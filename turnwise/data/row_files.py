"""Reads files of rows that are text: JSON (a line or an array entry per row) and CSV, also compressed by
gzip."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from turnwise.errors import DataError
from turnwise.runtime.jsonl import half_character

LINES = (".jsonl", ".ndjson", ".json")
TABLES = {".csv": ",", ".tsv": "\t"}
"""Suffix → what separates the cells of a line."""
SUFFIXES = (*LINES, *TABLES)
_GZIP = b"\x1f\x8b"
_OTHER_KINDS = {
    b"PAR1": "a Parquet file; name it .parquet",
    b"PK\x03\x04": "a zip archive; unpack it, or compress the file by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; decompress it, or compress the file by gzip",
    b"BZh": "compressed by bzip2; decompress it, or compress the file by gzip",
    b"\xfd7zXZ": "compressed by xz; decompress it, or compress the file by gzip",
    b"ARROW1": "an Arrow file; save the rows as Parquet or JSONL",
    b"\xff\xfe": "UTF-16 text; save the file as UTF-8",
    b"\xfe\xff": "UTF-16 text; save the file as UTF-8",
}
"""First bytes → what such a file is, and what to do."""

Row = tuple[str, Mapping[str, Any] | DataError]
"""A row's place, `FILE, line N`, with its columns, or with the error that names why it can't be read."""


def suffix_of(path: Path) -> str:
    """The suffix that says what is in the file: of `rows.csv.gz` it is `.csv`, of `rows.gz` `.jsonl`."""
    if path.suffix != ".gz":
        return path.suffix
    return Path(path.stem).suffix or ".jsonl"


def read_row_file(path: Path) -> Iterator[Row]:
    """Yields the rows of a file whose `suffix_of` is one of `SUFFIXES`. Raises DataError if the file can't be
    read."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a JSONL file in it")
    try:
        with path.open("rb") as raw:
            file = _decompressed(raw, path)
            if suffix_of(path) in TABLES:
                yield from _of_table(file, path)
            else:
                yield from _of_json(file, path)
    except FileNotFoundError as fault:
        raise DataError(f"{path}: no such file") from fault
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise DataError(
            f"{path} isn't whole: gzip can't decompress it ({fault}); write or download it again"
        ) from fault
    except OSError as fault:
        raise DataError(f"{path} can't be read: {fault.strerror}") from fault


def _decompressed(raw: BinaryIO, path: Path) -> BinaryIO:
    file: BinaryIO = raw
    if raw.read(len(_GZIP)) == _GZIP:
        raw.seek(0)
        file = cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    elif path.suffix == ".gz":
        raw.seek(0)
        if raw.read(1):
            raise DataError(f"{path} isn't compressed by gzip; rename it without .gz")
    file.seek(0)
    start = file.read(8)
    for first_bytes, kind in _OTHER_KINDS.items():
        if start.startswith(first_bytes):
            raise DataError(f"{path} is {kind}")
    file.seek(0)
    return file


def _of_json(file: BinaryIO, path: Path) -> Iterator[Row]:
    array = _array(file, path)
    if array is not None:
        for number, value in enumerate(array, start=1):
            place = f"{path}, row {number}"
            yield place, _row(value, place, "an entry of the array")
        return
    file.seek(0)
    for number, line in enumerate(file, start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                value = _parsed(line, place)
                yield place, _row(value, place, "a line")
            except DataError as fault:
                if number == 1 and suffix_of(path) == ".json":
                    raise DataError(f"{fault}. {_json_hint(file, path)}") from fault
                yield place, fault


def _array(file: BinaryIO, path: Path) -> list[Any] | None:
    """The entries, if the whole file is one JSON array of rows, else None."""
    first = b""
    for line in file:
        first = line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if first:
            break
    if first != b"[":
        return None
    file.seek(0)
    is_json = suffix_of(path) == ".json"
    try:
        value = _parsed(file.read(), str(path))
    except DataError:
        if is_json:
            raise
        return None
    is_of_rows = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    return value if is_of_rows or is_json else None


def _json_hint(file: BinaryIO, path: Path) -> str:
    file.seek(0)
    form = "a .json file holds an array of rows, [{…}, {…}], or one object per line"
    try:
        value = _parsed(file.read(), str(path))
    except DataError:
        return f"{form[0].upper()}{form[1:]}"
    head = "The whole file is one object over several lines"
    entries = value.items() if isinstance(value, dict) else ()
    for key, inner in entries:
        if isinstance(inner, list):
            return f"{head}, and its rows seem to be in `{key}`: save that list alone; {form}"
    return f"{head}; {form}"


def _parsed(text: bytes, place: str) -> Any:
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_single)
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as fault:
        raise DataError(
            f"{place} isn't UTF-8 (byte 0x{text[fault.start]:02x}); save the file as UTF-8"
        ) from fault
    except UnicodeEncodeError as fault:
        raise DataError(f"{place} {half_character(fault)}") from fault
    except _DoubledKeyError as fault:
        raise DataError(
            f"{place} has the key {fault.args[0]!r} twice in one object; keep one of them"
        ) from fault
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{place} isn't JSON ({fault})") from fault


class _DoubledKeyError(Exception):
    """An object of JSON has a key twice."""


def _single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DoubledKeyError(next(key for key in keys if keys.count(key) > 1))
    return made


def _row(value: Any, place: str, kind: str) -> Mapping[str, Any] | DataError:
    if isinstance(value, dict):
        return value
    return DataError(f"{place} is {json.dumps(value)[:40]}; {kind} is a JSON object, {{...}}")


def _of_table(file: BinaryIO, path: Path) -> Iterator[Row]:
    """The rows of a table, whose first line has the names of the columns. An empty cell is null; every other
    cell is text."""
    separator = TABLES[suffix_of(path)]
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(
        io.TextIOWrapper(file, encoding="utf-8-sig", newline=""),
        delimiter=separator,
        strict=True,
    )
    try:
        names = next(reader, [])
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise DataError(f"{path}, line 1 names the column {doubled[0]!r} twice; rename one of them")
        if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
            raise DataError(
                f"{path}, line 1 has no {separator!r}, which separates columns; save the table with it"
            )
        while True:
            line_number = reader.line_num + 1
            cells = next(reader, None)
            if cells is None:
                return
            place = f"{path}, line {line_number}"
            if len(cells) == len(names):
                yield place, {name: cell or None for name, cell in zip(names, cells, strict=True)}
            elif cells:
                yield (
                    place,
                    DataError(f"{place} has {len(cells)} cells, and line 1 names {len(names)} columns"),
                )
    except UnicodeDecodeError as fault:
        line_number = reader.line_num + 1
        byte = fault.object[fault.start]
        raise DataError(
            f"{path}, near line {line_number}, isn't UTF-8 (byte 0x{byte:02x}); save the file as UTF-8"
        ) from fault
    except csv.Error as fault:
        raise DataError(f"{path}, line {reader.line_num}, isn't a line of a table ({fault})") from fault
