"""A run on the terminal as plain text: one line a step, and warnings, those that are alike once."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from turnwise.tracking.columns import Columns


class TerminalTracker:
    """Prints the columns that the step has, every `every` steps and whenever something was validated."""

    def __init__(self, columns: Columns, num_steps: int, every: int = 1, file: TextIO | None = None) -> None:
        self._columns = columns
        self._num_steps = num_steps
        self._every = max(every, 1)
        self._file = file

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        is_validation = self._columns.validation.read(metrics) is not None
        if step % self._every and not is_validation and step != self._num_steps - 1:
            return
        width = len(str(self._num_steps))
        # What is measured after the last step has that step's number plus one.
        cells = [f"step {step + 1:>{width}}/{self._num_steps}" if step < self._num_steps else "final"]
        for column in self._columns.all:
            value = column.read(metrics)
            if value is not None:
                cells.append(f"{column.title} {column.text(value)}")
        print("  ".join(cells), file=self._file or sys.stdout, flush=True)

    def close(self) -> None:
        pass


class TerminalHandler(logging.Handler):
    """Warnings on what standard error is at that moment: a live view takes its place and prints them above itself.

    Those that are alike but for numbers (episodes, seeds, attempts) are printed once, then only counted: the count stands with
    the 10th, 100th, … and, with `close`, at the end. A message of which `MAX_KINDS` kinds were printed is counted as well.
    """

    MAX_KINDS = 5

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kinds: dict[str, set[str]] = {}
        self._counts: dict[str, int] = {}
        self._repeated: dict[str, str] = {}
        """The first of those that came again since their count was said."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        kind, source = re.sub(r"\d+", "0", line), f"{record.name}: {record.msg}"
        # Python's own warnings, and whatever was formatted before it was logged, have no text in common.
        kinds = self._kinds.setdefault(kind if record.msg == "%s" else source, set())
        if kind not in kinds and len(kinds) >= self.MAX_KINDS:
            kind = source
        kinds.add(kind)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1:
            self._say(line)
        elif count == 10 ** (len(str(count)) - 1):
            self._repeated.pop(kind, None)
            self._say(f"{line} (warned of it {count} times)")
        else:
            self._repeated[kind] = line

    def close(self) -> None:
        for kind, line in self._repeated.items():
            self._say(f"{line} (the last of {self._counts[kind]} such warnings)")
        self._repeated.clear()
        super().close()

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


@contextmanager
def warnings_on_terminal() -> Iterator[None]:
    """Prints the warnings of every logger and of Python's `warnings` as `TerminalHandler` does; inside another, nothing new."""
    root = logging.getLogger()
    if any(isinstance(handler, TerminalHandler) for handler in root.handlers):
        yield
        return
    handler = TerminalHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()
