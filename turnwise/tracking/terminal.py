"""A run on the terminal as plain text: one line a step, and the log's warnings."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
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
    """Log lines on what standard error is at that moment: a live view takes its place and prints them above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)
