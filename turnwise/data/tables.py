"""Rows of data sets (JSON, CSV, Parquet, `datasets`, the hub, Python), and the columns that rewards ask
for."""

import inspect
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from turnwise.data.bad_rows import BadRows
from turnwise.data.padding import are_messages, plain_schema, without_nulls
from turnwise.data.row_files import SUFFIXES, Row, read_row_file, suffix_of
from turnwise.errors import DataError, NotAvailableError, TurnwiseError, install_hint, nearest
from turnwise.model_files.hub import local_path, looks_like_hub_name
from turnwise.protocols import ChecksRows
from turnwise.runtime.entry_points import OBJECT_PREFIX, load_object
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.jsonl import half_character

logger = logging.getLogger(__name__)
T = TypeVar("T")

_INSTALL = install_hint("data")
_SECONDS_BETWEEN_LINES = 5.0
_OF_OTHERS = ("tools_kwargs", "interaction_kwargs")


class TableRow(NamedTuple):
    """One row: its columns, and its place (such as file and line) for error messages."""

    place: str
    columns: Mapping[str, Any]
    fault: str = ""
    """Why the row can't be read, with its place; "" if it can. A row that can't has no columns."""

    def check(self, label: str, checks: ChecksRows, columns: Mapping[str, Any]) -> None:
        """Raises DataError, which names the row and `label`, if `checks.check_row` refuses these columns of
        the row."""
        try:
            with Foreign(f"{label}.check_row", are_faults=True):
                checks.check_row(columns)
        except TurnwiseError as fault:
            raise DataError(f"{self.place}: {label}: {fault}") from fault


def read_tables(names: Sequence[str], key: str, bad: BadRows | None = None) -> list[TableRow]:
    """All rows of the sources, in their order. `key` is the setting that names them. Rows that can't be read
    are added to `bad` and left out.

    A source is a file (`.jsonl` or `.ndjson`; `.json`, also an array; `.csv`, `.tsv`; these also with `.gz`;
    `.parquet`), a folder that the datasets library saved, a name of the hub (`owner/name`, `owner/name:split`
    for another split than train, `owner/name:subset:split`), or `module:object` for rows in Python. Raises
    DataError, which names the source or row, if a source is missing, is empty or can't be read, or if without
    `bad` a row can't; NotAvailableError if it needs a library that isn't installed."""
    bad_rows = BadRows() if bad is None else bad
    rows = []
    for name in names:
        for row in _read(name, key):
            if row.fault:
                bad_rows.add(row.fault)
            else:
                rows.append(row)
    if bad is None:
        bad_rows.refuse("repair or remove them")
    return rows


def _read(name: str, key: str) -> Sequence[TableRow]:
    shown = name
    if name.startswith(OBJECT_PREFIX):
        shown = f"the {name.rpartition(':')[2]} given in Python"
    rows = []
    for place, columns in noting(_rows(name, key, shown), f"reading {shown}"):
        rows.append(_table_row(place, columns))
    if not rows:
        raise DataError(f"{key} {shown} has no rows (it is empty); give at least one, or remove it")
    return rows


def _table_row(place: str, columns: Mapping[str, Any] | DataError) -> TableRow:
    if isinstance(columns, DataError):
        return TableRow(place, {}, str(columns))
    try:
        return TableRow(place, _without_padding(plain_columns(columns, place)))
    except DataError as fault:
        return TableRow(place, {}, str(fault))


def _without_padding(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns without nulls in objects. Lists of messages stay, because calls in them may have nulls that
    a tool allows."""
    plain = {}
    for name, value in columns.items():
        if name == "tools":
            plain[name] = plain_schema(value)
        elif are_messages(value):
            plain[name] = value
        else:
            plain[name] = without_nulls(value)
    return plain


def _rows(name: str, key: str, shown: str) -> Iterator[Row]:
    path = local_path(name)
    if path.is_dir():
        return _numbered(_saved_dataset(path, key), name)
    if suffix_of(path) in SUFFIXES and (path.exists() or ":" not in name):
        return read_row_file(path)
    if path.suffix == ".parquet":
        return _numbered(_of_parquet(path), str(path))
    repository, *parts = name.split(":")
    if not path.exists() and looks_like_hub_name(repository):
        split = parts[-1] if parts else "train"
        return _numbered(_hub_dataset(repository, parts[:-1], split, key), name)
    if ":" in name and not path.exists():
        rows = listed(load_object(name, key, DataError))
        if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping | Iterator):
            raise DataError(
                f"{key} {shown} is a {type(rows).__name__}; rows are a list of mappings, or a Dataset"
            )
        return _numbered(rows, shown)
    reason = "has another form" if path.exists() else "there is no such file"
    raise DataError(
        f"{key} {name}: {reason}; rows are read from .jsonl, .json, .csv and .parquet files (text also as "
        ".gz), folders of the datasets library, names of the hub (owner/name) and Python objects "
        "(module:name)"
    )


def python_rows(rows: Iterable[Any], name: str) -> list[TableRow]:
    """The rows of a sequence in Python, read as those of a file: a row that is no mapping, or that JSON can't
    hold, has a `fault`."""
    return [_table_row(place, columns) for place, columns in _numbered(rows, name)]


def listed(rows: Any) -> Any:
    """The rows of a pyarrow.Table, which iterates over its columns, as a list; anything else as it is. Raises
    DataError for a data frame, whose rows can be of several forms, and for a dict, such as a DatasetDict or a
    single row."""
    if type(rows).__name__ == "DataFrame":
        raise DataError(
            "rows are a data frame; give datasets.Dataset.from_pandas(rows), or rows.to_dict('records')"
        )
    if isinstance(rows, Mapping):
        keys = ", ".join(map(str, rows)) or "nothing"
        raise DataError(
            f"rows are one list or Dataset, and got a {type(rows).__name__} with {keys}; give one of its "
            "data sets, or the row in a list, [row]"
        )
    arrow = sys.modules.get("pyarrow")  # whoever has a table has imported it
    if arrow is not None and isinstance(rows, arrow.Table):
        return rows.to_pylist()
    return rows


def _of_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as fault:
        raise NotAvailableError(
            f"{path}: Parquet files need pyarrow, which isn't installed; {_INSTALL}"
        ) from fault
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (arrow.ArrowException, OSError, ValueError) as fault:
        raise DataError(f"{path} isn't a readable Parquet file ({fault})") from fault


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as fault:
        raise NotAvailableError(
            f"{source} needs the datasets library, which isn't installed; {_INSTALL}"
        ) from fault
    return datasets


def _saved_dataset(path: Path, key: str) -> Any:
    datasets = _datasets(f"{key} {path}: a folder of rows")
    try:
        rows = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError) as fault:
        raise DataError(
            f"{key} {path} is a folder; name a JSONL file in it, or another of its files, since the datasets "
            f"library can't load this folder ({fault})"
        ) from fault
    if isinstance(rows, datasets.DatasetDict) and len(rows) == 1:
        (rows,) = rows.values()
    if isinstance(rows, datasets.DatasetDict):
        splits = ", ".join(str(path / split) for split in rows)
        raise DataError(f"{key} {path} holds several splits; name one of them: {splits}")
    return rows


def _hub_dataset(name: str, subset: Sequence[str], split: str, key: str) -> Any:
    datasets = _datasets(f"{key} {name}: a data set of the hub")
    try:
        return datasets.load_dataset(name, *subset, split=split)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as fault:
        line = next(iter(str(fault).strip().splitlines()), type(fault).__name__)
        raise DataError(
            f"{key} {name}: the hub doesn't give its split {split} ({line}); without network, download it "
            f"where there is one, `hf download --repo-type dataset {name}`, and name its files"
        ) from fault


def numbered(rows: Iterable[Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields `(place, row)` of each row; the place is `NAME, row N`. Raises DataError for a row that isn't a
    mapping."""
    for place, columns in _numbered(rows, name):
        if isinstance(columns, DataError):
            raise columns
        yield place, columns


def _numbered(rows: Iterable[Any], name: str) -> Iterator[Row]:
    for number, columns in enumerate(rows, start=1):
        place = f"{name}, row {number}"
        if isinstance(columns, Mapping):
            yield place, columns
        else:
            yield (
                place,
                DataError(f"{place} is of type {type(columns).__name__}; a row is a mapping of columns"),
            )


def plain_columns(columns: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The columns as a dict. Raises DataError for a name or value that JSON, in which runs save their rows,
    can't hold."""
    for name, value in columns.items():
        if not isinstance(name, str):
            raise DataError(
                f"{place}: the column name {name!r} is of type {type(name).__name__}; it must be a string"
            )
        try:
            json.dumps({name: value}, sort_keys=True, ensure_ascii=False).encode()
        except UnicodeEncodeError as fault:
            raise DataError(f"{place}: column {name!r} {half_character(fault)}") from fault
        except (TypeError, ValueError, RecursionError) as fault:
            raise DataError(
                f"{place}: column {name!r} is a {type(value).__name__}, which JSON can't hold ({fault}); "
                "make it a string or number, or remove the column"
            ) from fault
    return dict(columns)


def noting(rows: Iterable[T], label: str) -> Iterator[T]:
    """Yields the rows, and logs every few seconds how many there were so far. `label` begins the log line."""
    number = 0
    last_line_at = time.monotonic()
    for number, row in enumerate(rows, start=1):
        if time.monotonic() - last_line_at > _SECONDS_BETWEEN_LINES:
            last_line_at = time.monotonic()
            logger.warning("%s: %s rows so far", label, f"{number:,}")
        yield row
    logger.info("%s: %s rows", label, f"{number:,}")


def leaves(columns: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """`(path, value)` of every column, and of every entry of a mapping in it, however deep (but none inside
    `tools_kwargs` and `interaction_kwargs`, which are for tools and simulated users). Nested nulls are left
    out: Parquet gives a row a null for a nested key that only other rows have."""
    for name, value in columns.items():
        if path and value is None:
            continue
        yield (*path, str(name)), value
        if isinstance(value, Mapping) and name not in _OF_OTHERS:
            yield from leaves(value, (*path, str(name)))


def arguments_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """A row's columns and nested values by name, as arguments for functions. A column hides nested values of
    its name. If only nested values share a name, and they differ, none of them is an argument.

    >>> arguments_of({"prompt": "2+2", "reward_model": {"ground_truth": "4"}})["ground_truth"]
    '4'
    """
    arguments: dict[str, Any] = {}
    doubled = clashes(columns)
    for path, value in leaves(columns):
        if len(path) == 1 or path[-1] not in doubled:
            arguments.setdefault(path[-1], value)
    return arguments


def _is_missing(value: Any) -> bool:
    # A table of floats has NaN where another form of file has null.
    return value is None or (isinstance(value, float) and value != value)


def clashes(columns: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names that several columns or nested values share, with different values → their dotted paths."""
    places: dict[str, list[tuple[str, Any]]] = {}
    for path, value in leaves(columns):
        places.setdefault(path[-1], []).append((".".join(path), value))
    paths: dict[str, list[str]] = {}
    for name, of_name in places.items():
        if _differ([value for _, value in of_name]):
            paths[name] = [path for path, _ in of_name]
    return paths


def _differ(values: Sequence[Any]) -> bool:
    first = _comparable(values[0])
    return any(_comparable(value) != first for value in values[1:])


def _comparable(value: Any) -> Any:
    """What equal values share: the text of a number, `72` as well as 72 and 72.0. True equals 1, and a reward
    tells them apart."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | float) else value


@dataclass(frozen=True, slots=True)
class ParameterColumns:
    """The columns that a function asks for by the names of its parameters."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    takes_all: bool = False
    """Whether the function has `**columns`."""

    @classmethod
    def by(cls, function: Callable[..., Any], excluded: Sequence[str]) -> "ParameterColumns":
        """The columns for the function's parameters, except for those `excluded`, which it gets in another
        way."""
        required: list[str] = []
        optional: list[str] = []
        takes_all = False
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                takes_all = True
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if not is_named or parameter.name in excluded:
                continue
            if parameter.default is parameter.empty:
                required.append(parameter.name)
            else:
                optional.append(parameter.name)
        return cls(tuple(required), tuple(optional), takes_all)

    def choose(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for one row. If a column is null, a parameter that has a default keeps it."""
        arguments = arguments_of(columns)
        names = arguments if self.takes_all else (*self.required, *self.optional)
        chosen = {}
        for name in names:
            if name not in arguments:
                continue
            if arguments[name] is not None or name not in self.optional:
                chosen[name] = arguments[name]
        return chosen

    def check(self, rows: Sequence[TableRow], label: str) -> None:
        """Raises DataError, which names the row, if a required column is missing, null or NaN, or a row has
        the name of a parameter twice."""
        for row in rows:
            doubled = clashes(row.columns)
            for name in [*self.required, *self.optional]:
                if name in doubled:
                    raise DataError(
                        f"{row.place}: {label} gets the column {name!r}, and the row has it twice: "
                        f"{' and '.join(doubled[name])}; rename one of them"
                    )
            arguments = arguments_of(row.columns)
            present = [name for name, value in arguments.items() if not _is_missing(value)]
            for name in self.required:
                if name not in present:
                    shown = ", ".join(sorted(present)) or "none"
                    raise DataError(
                        f"{row.place}: {label} needs the column {name!r}, and the row has {shown} (null and "
                        f"NaN are none); add it, or give the parameter a default.{nearest(name, present)}"
                    )
