"""The spans of a run's `traces.jsonl` for `turnwise view`, found by step without decoding the file."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.report.view.episode_spans import Attempt, ShownSpan, SpansOfStep
from turnwise.runtime.rotating import earlier_part
from turnwise.tracking.spans import Span, Trace
from turnwise.tracking.trace_text import span_text
from turnwise.tracking.traces_file import read_trace

_SPANS = b',"spans":['
"""What follows the tags of a line."""
_DAMAGES = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading a line raises that is no trace, or one of another version."""


@dataclass(slots=True)
class _Part:
    """One of the two files, and where the lines of its steps are, in bytes."""

    path: Path
    inode: int = 0
    scanned: int = 0
    lines: dict[tuple[int, bool], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def scan(self) -> None:
        """Notes the lines that were appended since; begins anew if it has become another file."""
        status = self.path.stat()
        if status.st_ino != self.inode or status.st_size < self.scanned:
            self.lines.clear()
            self.scanned = 0
            self.inode = status.st_ino
        with self.path.open("rb") as file:
            file.seek(self.scanned)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                step = _step_of(line)
                if step is not None:
                    self.lines[step].append((self.scanned, len(line)))
                self.scanned += len(line)

    def read(self, step: tuple[int, bool]) -> Iterator[bytes]:
        places = self.lines.get(step, [])
        if not places:
            return
        with self.path.open("rb") as file:
            for start, size in places:
                file.seek(start)
                yield file.read(size)


class TraceSpans:
    """The traces of a run with `trace.backend: jsonl`. The run may go on meanwhile."""

    def __init__(self, path: Path) -> None:
        self._parts = [_Part(earlier_part(path)), _Part(path)]

    def of_step(self, step: int, is_validation: bool) -> SpansOfStep:
        """The spans of a step's episodes; steps count from 0. A line that can't be read is left out, as
        `turnwise trace` says of it."""
        spans: dict[tuple[str, int], list[Attempt]] = defaultdict(list)
        for part in self._parts:
            try:
                part.scan()
                lines = list(part.read((step, is_validation)))
            except OSError:
                continue  # there is no such part, or it was renamed in this moment
            for line in lines:
                with suppress(*_DAMAGES):
                    trace = read_trace(line)
                    key = (str(trace.tags["task"]), int(trace.tags["rollout_n"]))
                    attempt = _attempt(trace)
                    spans[key].append(attempt)
        return spans


def _step_of(line: bytes) -> tuple[int, bool] | None:
    """The step of a line, and whether it is a validation's; None if it is no trace."""
    head, marker, _ = line.partition(_SPANS)
    try:
        tags = json.loads(head + b"}")["tags"] if marker else None
    except (ValueError, LookupError, TypeError):
        tags = None
    if tags is None:
        # A tag's text may have the marker.
        tags = _tags(line)
    if not isinstance(tags, dict) or not isinstance(tags.get("step"), int):
        return None
    return tags["step"], bool(tags.get("validate"))


def _tags(line: bytes) -> Any:
    try:
        return json.loads(line)["tags"]
    except _DAMAGES:
        return None


def _attempt(trace: Trace) -> Attempt:
    """The spans of a trace but the episode itself, by their start. An episode that failed has its span too,
    since the error is its."""
    episode = trace.spans[0]
    spans = [span for span in trace.spans[1:] if span.end_ns >= span.start_ns]
    spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
    if episode.error:
        spans.append(episode)
    return [_shown(span, trace) for span in spans]


def _shown(span: Span, trace: Trace) -> ShownSpan:
    episode = trace.spans[0]
    owner = trace.spans[span.parent] if span.parent else span
    number = owner.attributes.get("turnwise.turn")
    response_ids = None
    if span.kind == "generate":
        response_ids = span.attributes.get("turnwise.response_ids")
    return ShownSpan(
        span.name,
        (span.start_ns - episode.start_ns) / 1e9,
        (span.end_ns - span.start_ns) / 1e9,
        number,
        span_text(span),
        bool(span.error),
        bool(span.parent),
        response_ids,
    )
