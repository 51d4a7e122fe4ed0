"""Keeps traces in `traces.jsonl`, one line an episode, and reads them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic_core import to_json

from turnwise.errors import DataError
from turnwise.runtime.rotating import RotatingFile, earlier_part
from turnwise.tracking.spans import Decode, Span, SpanKind, Trace

_KINDS = get_args(SpanKind)


class TracesFile:
    """Writes traces to a RotatingFile. With `decode` the texts of responses are beside their token ids."""

    def __init__(self, path: Path, max_bytes: int, decode: Decode | None) -> None:
        self._file = RotatingFile(path, max_bytes)
        self._decode = decode
        self.place = str(path)

    def write(self, traces: Sequence[Trace]) -> list[str]:
        too_large = []
        for trace in traces:
            line = _line(trace.written(self._decode))
            if not self._file.write(line):
                too_large.append(f"a trace has {len(line):,} bytes, more than trace.max_mb allows")
        return too_large

    def close(self) -> None:
        self._file.close()


def _line(record: dict[str, Any]) -> bytes:
    try:
        return to_json(record) + b"\n"
    except ValueError:  # a text with half a surrogate pair
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="replace") + b"\n"


def traces_beside(rollouts: Path) -> Path:
    """The file of the traces of those episodes whose trajectories `turnwise rollout` or `turnwise eval` has
    written to a file.

    >>> traces_beside(Path("played/lake.jsonl")).as_posix()
    'played/lake-traces.jsonl'
    """
    return rollouts.with_name(f"{rollouts.stem}-traces.jsonl")


def read_traces(path: Path, lost: list[str]) -> Iterator[Trace]:
    """The traces of a file and of its earlier part, in the order in which they were written. A line that
    can't be read, such as one that a kill has cut, is left out: a sentence about it is appended to `lost`.
    Raises DataError if there is no such file."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; a run with trace.backend: jsonl writes it")
    for part in filter(Path.is_file, (earlier_part(path), path)):
        with part.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield read_trace(line)
                except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as fault:
                    reason = f"{type(fault).__name__}: {fault}"
                    lost.append(f"{part.name}, line {number} is left out: it is no trace ({reason})")


def read_trace(line: bytes) -> Trace:
    """The trace of a line. Raises KeyError, TypeError, ValueError, AttributeError or RecursionError if it is
    none."""
    content = json.loads(line)
    spans = [_span(record) for record in content["spans"]]
    for number, span in enumerate(spans):
        is_root = span.parent is None
        if is_root != (number == 0) or not (is_root or 0 <= (span.parent or 0) < len(spans)):
            raise ValueError(f"span {number} has the parent {span.parent}")
    if not spans:
        raise ValueError("it has no spans")
    return Trace(content["trace"], dict(content["tags"]), spans)


def _span(record: dict[str, Any]) -> Span:
    kind = record["kind"]
    if kind not in _KINDS:
        raise ValueError(f"the kind {kind!r}; allowed: {', '.join(_KINDS)}")
    parent = record["parent"]
    if parent is not None:
        parent = int(parent)
    return Span(
        str(record["name"]),
        kind,
        int(record["start_ns"]),
        int(record["end_ns"]),
        parent,
        dict(record["attributes"]),
        str(record["error"]),
    )
