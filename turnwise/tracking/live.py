"""The live view of a run on a terminal, drawn by rich."""

import math
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Console, ConsoleRenderable, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from turnwise.errors import counted
from turnwise.protocols import NO_TEXTS, StepTexts, Tracker
from turnwise.runtime.console import printable
from turnwise.tracking.metric_columns import MetricColumn, MetricColumns
from turnwise.tracking.pace import Pace, duration
from turnwise.tracking.terminal import TerminalTracker, Ticker

REFRESH_PER_S = 2
"""How many times a second a thread of rich draws the screen. Each time takes a few milliseconds of the run's
time."""
MAX_SHOWN_LINES = 8
"""Maximum lines of a sample, so that the live view fits on one screen."""
_LABEL_WIDTH = 10
_BAR_WIDTH = 32
_MIN_BAR_WIDTH = 8
_BARS = "▁▂▃▄▅▆▇█"


class Screen:
    """What the live view shows of one run. Times are seconds of any clock, passed in by the caller."""

    def __init__(self, title: str, columns: MetricColumns, pace: Pace) -> None:
        self.pace = pace
        self._title = title
        self._columns = columns
        self._history: dict[str, list[tuple[int, float]]] = {}
        self._closed_at: float | None = None
        self._phases = ""  # seconds of the last step, and the shares of its phases
        self._sample = Text(no_wrap=True, overflow="ellipsis")

    def show(self, text: str) -> None:
        """Shows the first `MAX_SHOWN_LINES` lines of `text` from now on, with control characters escaped."""
        lines = printable(text).splitlines()[:MAX_SHOWN_LINES] or [""]
        sample = Text(
            "\n",
            no_wrap=True,
            overflow="ellipsis",
        ).append(lines[0], "bold")
        for line in lines[1:]:
            sample.append(f"\n{line}")
        self._sample = sample

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        time_s: float,
    ) -> None:
        """Adds the metrics of a finished step to the curves, and notes in `pace` that it has ended."""
        interval_s = self.pace.end_step(step, time_s)
        for column in self._columns.all:
            value = column.read(metrics)
            if value is not None:
                self._history.setdefault(column.name, []).append((step, value))
        # The validation after the last step is logged as one more step: the phases shown stay those of the
        # last step.
        if step < self.pace.num_steps or not self._phases:
            self._phases = _phases(metrics, interval_s)

    def close(self, time_s: float) -> None:
        self._closed_at = time_s

    def render(self, time_s: float, width: int = 120) -> Group:
        """The whole screen for a terminal of `width` columns."""
        rows = Table.grid()
        rows.add_column(width=_LABEL_WIDTH, style="dim")
        if self._closed_at is None:
            rows.add_row("now", "  ".join(self.pace.describe(time_s)))
        else:
            end = "done" if self.pace.num_done == self.pace.num_steps else "stopped"
            rows.add_row(end, f"after {duration(self.pace.elapsed(self._closed_at))}")
        for column in (*self._columns.trends, self._columns.validation):
            history = self._history.get(column.name)
            if history:
                rows.add_row(column.title, self._trend(column, history))
        details = []
        for column in self._columns.details:
            history = self._history.get(column.name)
            if history:
                _, value = history[-1]
                details.append(f"{column.title} {column.text(value)}")
        if details:
            rows.add_row("details", "  ".join(details))
        if self._phases:
            rows.add_row("time", self._phases)
        return Group(self._header(time_s, width), rows, self._sample)

    def _trend(self, column: MetricColumn, history: Sequence[tuple[int, float]]) -> Text:
        """The last value and a curve; of the validation also the first and the best value."""
        values = [value for _, value in history]
        trend = Text(f"{column.text(values[-1]):<8}", "bold")
        trend.append(sparkline(values, _BAR_WIDTH), "cyan")
        if column is self._columns.validation:
            choose = min if self._columns.is_lower_better else max
            best_step, best = choose(history, key=lambda point: point[1])
            best_text = f"best {column.text(best)} after {counted(best_step, 'step')}"
            trend.append(f"  first {column.text(values[0])}  {best_text}", "dim")
        return trend

    def _header(self, time_s: float, width: int) -> Text:
        """Title, steps, bar and time left. On a narrow terminal the bar is left out first, then the title is
        cut."""
        num_done = self.pace.num_done
        num_steps = self.pace.num_steps
        share = num_done / max(num_steps, 1)
        step = f"step {num_done}/{num_steps}  "
        percent = f"{share:.0%}  "
        time_left = ""
        if self._closed_at is None:
            time_left = self.pace.time_left(time_s)
        room = width - len(step) - len(percent) - len(time_left)
        bar_width = min(room - len(self._title) - 4, _BAR_WIDTH)
        has_bar = bar_width >= _MIN_BAR_WIDTH
        title = self._title
        if not has_bar:
            title = title[: max(room - 2, 0)]
        text = Text(no_wrap=True, overflow="ellipsis")
        if title:
            text.append(f"{title}  ", "bold")
        text.append(step)
        if has_bar:
            filled = round(share * bar_width)
            text.append("━" * filled, "green")
            text.append("─" * (bar_width - filled), "dim")
            text.append("  ")
        return text.append(percent).append(time_left, "bold")


def _phases(metrics: Mapping[str, float], interval_s: float) -> str:
    """The seconds since the step before, and the share of each phase. `total` and `wall` are sums, not
    phases."""
    phases = {}
    for metric, seconds in metrics.items():
        name = metric.removeprefix("time/step_")
        if name != metric and name not in ("total", "wall"):
            phases[name] = seconds
    total_s = max(interval_s, sum(phases.values()))
    cells = [f"{total_s:.1f} s"]
    for name, seconds in phases.items():
        if seconds >= 0.01 * total_s > 0:
            cells.append(f"{name.replace('_', ' ')} {seconds / total_s:.0%}")
    return "  ".join(cells)


def sparkline(values: Sequence[float], width: int) -> str:
    """The finite values as bars between their extremes. If there are more than `width`, a bar is the mean of
    several values.

    >>> sparkline([0.0, 1.0, 2.0, 3.0, 7.0], 8), sparkline([0.0, 0.0, 7.0, 7.0], 2)
    ('▁▂▃▄█', '▁█')
    >>> sparkline([2.0, float("nan"), 2.0], 8)
    '▄▄'
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    if len(values) > width:
        edges = [len(values) * index // width for index in range(width + 1)]
        values = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    low = min(values)
    high = max(values)
    if not low < high:
        return _BARS[3] * len(values)
    heights = [(value - low) / (high - low) for value in values]
    return "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)


class _ResizableLive(Live):
    """A Live that also erases the extra lines which appear if a narrowed terminal wraps the last frame. In a
    terminal that cuts lines instead (xterm), it erases as many lines of other output above the frame."""

    _widths: Sequence[int] = ()
    """Width of each line of the last frame, in terminal cells."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        num_wrapped = sum((width - 1) // self.console.width for width in self._widths if width)
        up = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * num_wrapped
        lines = self.console.render_lines(self.get_renderable(), pad=False)
        self._widths = [sum(segment.cell_length for segment in line) for line in lines]
        return [Control(*up), *super().process_renderables(renderables)]


class LiveTracker:
    """A screen that stays in place, below all other output. It appears with the first phase or step, and ends
    with `close` or with the process. Its last state stays on the terminal, and the cursor is shown again."""

    def __init__(self, screen: Screen, console: Console) -> None:
        self._screen = screen
        self._live = _ResizableLive(
            get_renderable=lambda: screen.render(time.monotonic(), console.width),
            console=console,
            refresh_per_second=REFRESH_PER_S,
            # If stderr goes to a file, it must still go there.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._ticker = Ticker(self._advise)
        self._stop = weakref.finalize(self, self._live.stop)

    def begin_phase(self, name: str) -> None:
        self._ticker.start()
        self._screen.pace.begin_phase(name, time.monotonic())
        self._show()

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        texts: StepTexts = NO_TEXTS,
    ) -> None:
        if texts.brief:
            self._screen.show(texts.brief)
        self._screen.log(step, metrics, time.monotonic())
        self._show()

    def close(self) -> None:
        self._ticker.end()
        self._screen.close(time.monotonic())
        self._stop()

    def _advise(self) -> None:
        self._screen.pace.advise(time.monotonic())

    def _show(self) -> None:
        if self._stop.alive and not self._live.is_started:
            self._live.start()


def stdout_tracker(
    title: str,
    columns: MetricColumns,
    pace: Pace,
    every: int,
    console: Console | None = None,
) -> Tracker:
    """The live view if standard output is a terminal that can move its cursor, else a line every `every`
    steps."""
    console = console or Console()
    if console.file.isatty() and not console.is_dumb_terminal:
        return LiveTracker(Screen(title, columns, pace), console)
    return TerminalTracker(columns, pace, every)
