"""The live view of a run on a terminal, drawn by rich."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType

from turnwise.protocols import Tracker
from turnwise.tracking.metric_columns import MetricColumns
from turnwise.tracking.pace import Pace
from turnwise.tracking.screen import Screen
from turnwise.tracking.terminal import TerminalTracker, Ticker

REFRESH_PER_S = 2
"""How often a thread of rich draws the screen. A drawing takes about a millisecond of the run's time."""


class LiveTracker:
    """One screen that stays in place; output printed or logged meanwhile appears above it.

    It goes up with the first phase or step, and comes down with `close` or with the process, whichever is first: its last
    state stays on the terminal and the cursor is back.
    """

    def __init__(self, screen: Screen, console: Console) -> None:
        self._screen = screen
        self._live = _ResizableLive(
            _Frame(screen),
            console=console,
            refresh_per_second=REFRESH_PER_S,
            # A standard error that goes to a file must still go there.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._ticker = Ticker(self._advise)
        self._take_down = weakref.finalize(self, self._live.stop)

    def begin_phase(self, name: str) -> None:
        self._ticker.start()
        self._screen.begin_phase(name, time.monotonic())
        self._put_up()

    def show(self, text: str) -> None:
        self._screen.show(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._screen.log(step, metrics, time.monotonic())
        self._put_up()

    def close(self) -> None:
        self._ticker.end()
        self._screen.close(time.monotonic())
        self._take_down()

    def _advise(self) -> None:
        self._screen.pace.advise(time.monotonic())

    def _put_up(self) -> None:
        if self._take_down.alive and not self._live.is_started:
            self._live.start()


class _Frame:
    """The current screen, and its last drawn frame."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._widths: list[int] = []
        """Width of each line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self._screen.render(time.monotonic(), options.max_width)
        self._widths = [min(line.cell_len, options.max_width) for line in text.split("\n")]
        yield text

    def num_wrapped(self, width: int) -> int:
        """Number of extra lines into which a terminal of that width has wrapped the last frame."""
        return sum(-(-line // width) - 1 for line in self._widths if line)


class _ResizableLive(Live):
    """A terminal that became narrower has wrapped the last frame into more lines than rich knows of; they are removed too. A
    terminal that cuts lines instead (xterm) loses as many lines above."""

    def __init__(self, frame: _Frame, **options: Any) -> None:
        super().__init__(frame, **options)
        self._drawn = frame

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        num_wrapped = self._drawn.num_wrapped(self.console.width) if self.console.is_terminal else 0
        up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * num_wrapped
        return [Control(*up), *super().process_renderables(renderables)]


def stdout_tracker(
    title: str, columns: MetricColumns, num_steps: int, every: int, console: Console | None = None, pace: Pace | None = None
) -> Tracker:
    """The live view if standard output is a terminal that can move its cursor, else plain lines."""
    console = console or Console()
    if console.file.isatty() and not console.is_dumb_terminal:
        return LiveTracker(Screen(title, columns, num_steps, pace=pace), console)
    return TerminalTracker(columns, num_steps, every, pace=pace)
