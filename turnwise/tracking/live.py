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
from turnwise.tracking.metric_columns import MetricColumns
from turnwise.tracking.pace import Pace, duration
from turnwise.tracking.terminal import TerminalTracker, Ticker

REFRESH_PER_S = 2
"""How many times a second a thread of rich draws the screen. Each time takes a few milliseconds of the run's
time."""
MAX_SHOWN_LINES = 8
"""Maximum lines of a sample, so that the live view fits on one screen."""
_LABEL_WIDTH, _BAR_WIDTH, _MIN_BAR_WIDTH = 10, 32, 8
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
        self._shown = Text(no_wrap=True, overflow="ellipsis")

    def show(self, text: str) -> None:
        """Shows the first `MAX_SHOWN_LINES` lines of `text` from now on, with control characters escaped."""
        printable = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
        first, *rest = printable.splitlines()[:MAX_SHOWN_LINES] or [""]
        self._shown = (
            Text("\n", no_wrap=True, overflow="ellipsis").append(first, "bold").append("\n".join(["", *rest]))
        )

    def log(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Adds the metrics of a finished step to the curves, and notes in `pace` that it has ended."""
        interval_s = self.pace.end_step(step, now)
        for column in self._columns.all:
            if (value := column.read(metrics)) is not None:
                self._history.setdefault(column.name, []).append((step, value))
        # The validation after the last step is logged as one more step: the phases shown stay those of the
        # last step.
        if step < self.pace.num_steps or not self._phases:
            self._phases = _phases(metrics, interval_s)

    def close(self, now: float) -> None:
        self._closed_at = now

    def render(self, now: float, width: int = 120) -> Group:
        """The whole screen for a terminal of `width` columns."""
        rows = Table.grid()
        rows.add_column(width=_LABEL_WIDTH, style="dim")
        if self._closed_at is None:
            rows.add_row("now", "  ".join(self.pace.describe(now)))
        else:
            rows.add_row(
                "done" if self.pace.num_done == self.pace.num_steps else "stopped",
                f"after {duration(self.pace.elapsed(self._closed_at))}",
            )
        for column in (*self._columns.trends, self._columns.validation):
            if history := self._history.get(column.name):
                values = [value for _, value in history]
                trend = Text(f"{column.text(values[-1]):<8}", "bold").append(
                    sparkline(values, _BAR_WIDTH), "cyan"
                )
                if column is self._columns.validation:
                    best_step, best = (min if self._columns.is_lower_better else max)(
                        history, key=lambda point: point[1]
                    )
                    best_text = f"best {column.text(best)} after {counted(best_step, 'step')}"
                    trend.append(f"  first {column.text(values[0])}  {best_text}", "dim")
                rows.add_row(column.title, trend)
        found = [(c, last[-1][1]) for c in self._columns.details if (last := self._history.get(c.name))]
        if found:
            rows.add_row("details", "  ".join(f"{c.title} {c.text(value)}" for c, value in found))
        if self._phases:
            rows.add_row("time", self._phases)
        return Group(self._header(now, width), rows, self._shown)

    def _header(self, now: float, width: int) -> Text:
        """Title, steps, bar and time left. On a narrow terminal the bar is left out first, then the title is
        cut."""
        num_done, num_steps = self.pace.num_done, self.pace.num_steps
        share = num_done / max(num_steps, 1)
        step, end = f"step {num_done}/{num_steps}  ", f"{share:.0%}  "
        left = self.pace.time_left(now) if self._closed_at is None else ""
        room = width - len(step) - len(end) - len(left)
        bar = min(room - len(self._title) - 4, _BAR_WIDTH)
        title = self._title if bar >= _MIN_BAR_WIDTH else self._title[: max(room - 2, 0)]
        text = (
            Text(no_wrap=True, overflow="ellipsis").append(f"{title}  " if title else "", "bold").append(step)
        )
        if bar >= _MIN_BAR_WIDTH:
            filled = round(share * bar)
            text.append("━" * filled, "green").append("─" * (bar - filled), "dim").append("  ")
        return text.append(end).append(left, "bold")


def _phases(metrics: Mapping[str, float], interval_s: float) -> str:
    """The seconds since the step before, and the share of each phase. `total` and `wall` are sums, not
    phases."""
    times = {
        name.removeprefix("time/step_"): value
        for name, value in metrics.items()
        if name.startswith("time/step_")
    }
    phases = {name: value for name, value in times.items() if name not in ("total", "wall")}
    whole = max(interval_s, sum(phases.values()))
    shares = [(name, value / whole) for name, value in phases.items() if value >= 0.01 * whole > 0]
    return "  ".join([f"{whole:.1f} s", *(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares)])


def sparkline(values: Sequence[float], width: int) -> str:
    """The finite values as bars between their extremes. If there are more than `width`, a bar is the mean of
    several values.

    >>> sparkline([0.0, 1.0, 2.0, 3.0, 7.0], 8), sparkline([0.0, 0.0, 7.0, 7.0], 2), sparkline([2.0,
    float("nan"), 2.0], 8) ('▁▂▃▄█', '▁█', '▄▄')
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if not low < high:
        return _BARS[3] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


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

    def log(self, step: int, metrics: Mapping[str, float], texts: StepTexts = NO_TEXTS) -> None:
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
    title: str, columns: MetricColumns, pace: Pace, every: int, console: Console | None = None
) -> Tracker:
    """The live view if standard output is a terminal that can move its cursor, else a line every `every`
    steps."""
    console = console or Console()
    if console.file.isatty() and not console.is_dumb_terminal:
        return LiveTracker(Screen(title, columns, pace), console)
    return TerminalTracker(columns, pace, every)
