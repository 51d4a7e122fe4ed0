"""`turnwise train --profile`: what ran when, as a Chrome trace (chrome://tracing,
https://ui.perfetto.dev)."""

import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.runtime.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

MAX_SPANS = 200_000
"""Maximum spans, about 25 MB. Later spans are counted and left out."""
MAX_LANES = 16
"""Maximum rows for overlapping spans of one track. Spans that find no row are only counted."""
_SHORT_S = 2e-4
_GAP_S = 2e-4
"""Spans of one name become one span if each is shorter than `_SHORT_S` and the next follows within `_GAP_S`.
So the steps of ten thousand cooperative environments are one block between two steps of the engine."""


@dataclass(slots=True)
class TimedSpan:
    """Something that ran on a track from `start` to `end`, in seconds. If short calls were merged, `calls` is
    their number."""

    name: str
    start: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)
    calls: int = 1


class Timeline(Stopwatch):
    """A stopwatch that keeps at most `max_spans` spans, and writes them to `path` at its close."""

    def __init__(self, path: Path, max_spans: int = MAX_SPANS) -> None:
        super().__init__()
        self._path = path
        self._max_spans = max_spans
        self._began = self.now()
        self._tracks: dict[str, list[TimedSpan]] = {}
        self._num_spans = 0
        self.num_dropped = 0

    def add(
        self,
        track: str,
        name: str,
        started: float,
        ended: float | None = None,
        **details: Any,
    ) -> None:
        if ended is None:
            ended = self.now()
        self._spent(track, ended - started)
        spans = self._tracks.setdefault(track, [])
        if spans and spans[-1].name == name and _is_next(spans[-1], started, ended):
            spans[-1].end = ended
            spans[-1].calls += 1
        elif self._num_spans < self._max_spans:
            spans.append(TimedSpan(name, started, ended, details))
            self._num_spans += 1
        else:
            self.num_dropped += 1

    def close(self) -> None:
        """Writes the file, whole or not at all."""
        partial = self._path.with_name(self._path.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(json.dumps(event) for event in self._events()))
            file.write("\n]}\n")
        partial.replace(self._path)
        if self.num_dropped:
            logger.warning(
                "%s ends early: %d spans more than %d", self._path, self.num_dropped, self._max_spans
            )

    def _events(self) -> Iterator[dict[str, Any]]:
        process = os.getpid()
        row = 0
        # A list, since the trainer's thread may still be in a call that Ctrl-C didn't wait for.
        for track, spans in list(self._tracks.items()):
            lanes, num_left_out = _lanes(spans)
            for number, lane in enumerate(lanes, start=1):
                row += 1
                name = track
                if len(lanes) > 1:
                    name += f" {number}"
                if number == 1 and num_left_out:
                    name += f" ({num_left_out} more at the same time)"
                thread = {"pid": process, "tid": row}
                yield {"ph": "M", "name": "thread_name", "args": {"name": name}, **thread}
                yield {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": row}, **thread}
                for span in lane:
                    yield self._event(span) | thread

    def _event(self, span: TimedSpan) -> dict[str, Any]:
        start_us = (span.start - self._began) * 1e6
        length_us = (span.end - span.start) * 1e6
        return {
            "ph": "X",
            "name": span.name,
            "ts": round(start_us, 1),
            "dur": round(length_us, 1),
            "args": span.details if span.calls == 1 else {"calls": span.calls},
        }


def _is_next(last: TimedSpan, started: float, ended: float) -> bool:
    is_short = ended - started < _SHORT_S
    is_last_short = last.calls > 1 or last.end - last.start < _SHORT_S
    return is_short and is_last_short and 0 <= started - last.end < _GAP_S


def _lanes(spans: Iterable[TimedSpan]) -> tuple[list[list[TimedSpan]], int]:
    """Puts each span into the first lane that is free; also returns how many found none."""
    lanes: list[list[TimedSpan]] = []
    num_left_out = 0
    for span in sorted(spans, key=lambda span: span.start):
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is not None:
            free.append(span)
        elif len(lanes) < MAX_LANES:
            lanes.append([span])
        else:
            num_left_out += 1
    return lanes, num_left_out
