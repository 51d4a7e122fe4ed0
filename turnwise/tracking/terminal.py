"""Plain text on the terminal: one line per step, and warnings; similar warnings are printed once."""

import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar, TextIO

from turnwise.protocols import NO_TEXTS, StepTexts
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.tracking.metric_columns import MetricColumn, MetricColumns
from turnwise.tracking.pace import Pace

SILENCE_S = 30.0
"""Seconds of silence after which a phase prints its progress."""
_TICK_S = 1.0


class Ticker:
    """A thread that calls a method every second, from `start` until `end` or until the method's object is
    gone."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=_tick,
            args=(weakref.WeakMethod(call), self._ended),
            name="ticker",
            daemon=True,
        )

    def start(self) -> None:
        """Starts the thread; a second call does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        self._ended.set()


def _tick(call: weakref.WeakMethod[Callable[[], None]], ended: threading.Event) -> None:
    while not ended.wait(_TICK_S):
        method = call()
        if method is None:
            return
        with suppress(OSError, ValueError):  # standard output may be closed
            method()
        del method


class TerminalTracker:
    """Prints a line with the step's columns every `every` steps, after the last step and at validations.
    After `SILENCE_S` s without a line, prints the progress of the phase. `file` None = the current standard
    output."""

    def __init__(
        self,
        columns: MetricColumns,
        pace: Pace,
        every: int = 1,
        file: TextIO | None = None,
    ) -> None:
        self._columns = columns
        self._every = max(every, 1)
        self._file = file
        self._pace = pace
        self._printed_at = time.monotonic()
        self._ticker = Ticker(self.tick)

    def begin_phase(self, name: str) -> None:
        self._ticker.start()
        self._pace.begin_phase(name, time.monotonic())

    def tick(self, time_s: float | None = None) -> None:
        """Logs advice and prints progress, each if it is due. `time_s` is a time of `time.monotonic()` (None
        = now)."""
        if time_s is None:
            time_s = time.monotonic()
        self._pace.advise(time_s)
        if time_s - self._printed_at < SILENCE_S:
            return
        prefix = "  "
        if self._pace.num_done < self._pace.num_steps:
            prefix += f"step {self._pace.num_done + 1}/{self._pace.num_steps}: "
        phase, *progress = self._pace.describe(time_s)
        self._print([prefix + phase, *progress, self._pace.time_left(time_s)], time_s)

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        texts: StepTexts = NO_TEXTS,
    ) -> None:
        self._pace.end_step(step, time.monotonic())
        num_steps = self._pace.num_steps
        is_validation = self._columns.validation.read(metrics) is not None
        if step % self._every and not is_validation and step != num_steps - 1:
            return
        # What is measured after the last step has that step's number plus one.
        is_final = step >= num_steps
        cells = ["final"]
        if not is_final:
            cells = [f"step {step + 1:>{len(str(num_steps))}}/{num_steps}"]
        for column in self._columns.all:
            value = column.read(metrics)
            if value is None:
                continue
            cell = f"{column.title} {column.text(value)}"
            if column is self._columns.validation and not is_final:
                cell += f" (after {step})"  # a row's validation is of the policy before its step
            cells.append(cell)
        self._print(cells, time.monotonic())

    def close(self) -> None:
        self._ticker.end()

    def _print(self, cells: Sequence[str], time_s: float) -> None:
        self._printed_at = time_s
        line = "  ".join(cells).rstrip()
        print(
            f"{line}\n",
            end="",
            file=self._file or sys.stdout,
            flush=True,
        )


class TerminalHandler(logging.Handler):
    """Prints warnings to the current `sys.stderr`, which a live view replaces so that they appear above the
    view. Warnings that differ only in numbers (episodes, seeds, attempts) are of one kind. A kind is printed
    once, then counted: the count is printed at the 10th, 100th, … warning and at `close`. After `MAX_KINDS`
    kinds of one logging call, all others count as one kind. With `only_new`, what any handler of this process
    has printed already isn't printed again. Neither a logging call with wrong arguments nor a closed
    `sys.stderr` raises an error."""

    MAX_KINDS = 5
    _printed: ClassVar[set[str]] = set()  # the first line of each kind, of all handlers: few, since kinds are

    def __init__(self, only_new: bool = False) -> None:
        super().__init__(logging.WARNING)
        self._only_new = only_new
        self._kinds: dict[str, set[str]] = {}
        self._counts: dict[str, int] = {}
        self._repeated: dict[str, str] = {}
        """Kind → its last text, for kinds repeated since their count was printed."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self._only_new and line in self._printed:
                return
            kind = self._kind_of(line, record)
            count = self._counts.get(kind, 0) + 1
            self._counts[kind] = count
            if count == 1:
                self._printed.add(line)
                self._say(line)
            elif count == 10 ** (len(str(count)) - 1):
                self._repeated.pop(kind, None)
                self._say(f"{line} (warned of it {count} times)")
            else:
                self._repeated[kind] = line
        except Exception:  # boundary: a library may log anything
            with suppress(ValueError):  # standard error is closed, too
                self.handleError(record)

    def _kind_of(self, line: str, record: logging.LogRecord) -> str:
        kind = re.sub(r"\d+", "0", line)
        source = f"{record.name}: {record.msg}"
        # Python's own warnings, and messages that were formatted before they were logged, share no template.
        template = kind if record.msg == "%s" else source
        kinds = self._kinds.setdefault(template, set())
        if kind not in kinds and len(kinds) >= self.MAX_KINDS:
            kind = source
        kinds.add(kind)
        return kind

    def close(self) -> None:
        for kind, line in self._repeated.items():
            self._say(f"{line} (the last of {self._counts[kind]} such warnings)")
        self._repeated.clear()
        super().close()

    def _say(self, line: str) -> None:
        with suppress(OSError, ValueError):  # standard error may be closed
            print(line, file=sys.stderr, flush=True)


@contextmanager
def progress_on_terminal(stopwatch: Stopwatch, tokens_per_episode: int) -> Iterator[Callable[[str], None]]:
    """Reports the progress of a long phase on standard error, for commands that play without training. Yields
    a function to call with the name of each phase as it begins."""
    no_columns = MetricColumns((), MetricColumn("", "", ""), (), ())
    pace = Pace(0, 0, stopwatch, tokens_per_episode)
    tracker = TerminalTracker(no_columns, pace, file=sys.stderr)
    try:
        yield tracker.begin_phase
    finally:
        tracker.close()


@contextmanager
def warnings_on_terminal(only_new: bool = False) -> Iterator[None]:
    """Prints all warnings, from loggers and from Python, through `TerminalHandler`, with `only_new` those
    that this process hasn't printed yet. A nested call does nothing."""
    root = logging.getLogger()
    if any(isinstance(handler, TerminalHandler) for handler in root.handlers):
        yield
        return
    handler = TerminalHandler(only_new)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()
