"""The live view of a run as text. It reads no clock and no terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.text import Text

from turnwise.errors import counted
from turnwise.tracking.metric_columns import MetricColumn, MetricColumns
from turnwise.tracking.pace import Pace, duration

MAX_SHOWN_LINES = 8
"""Lines of a sample at most, so that the whole stays on one screen."""

_LABEL_WIDTH = 10
_BAR_WIDTH = 32
_MIN_BAR_WIDTH = 8
"""A shorter bar of the whole run is left out."""
_BARS = "▁▂▃▄▅▆▇█"
_PHASE_STYLES = ("cyan", "blue", "magenta", "yellow", "green", "red")


class Screen:
    """The state of one run and its picture. Times are seconds of any clock, passed in by the caller; `pace` has a stopwatch
    that knows how far a phase is.

    The part that changes with a step is laid out once a step; `render` adds the lines that a clock moves.
    """

    def __init__(self, title: str, columns: MetricColumns, num_steps: int, num_done: int = 0, pace: Pace | None = None) -> None:
        self.pace = pace or Pace(num_steps, num_done)
        self._title = title
        self._columns = columns
        self._history: dict[str, list[tuple[int, float]]] = {}
        self._closed_at: float | None = None
        self._styles: dict[str, str] = {}
        self._shown = Text()
        self._last_step: tuple[Mapping[str, float], float] = {}, 0.0
        """The last step's metrics and seconds."""
        self._body, self._body_width = Text(), 0

    def begin_phase(self, name: str, now: float) -> None:
        self.pace.begin_phase(name, now)

    def show(self, text: str) -> None:
        """Keeps the first lines of `text`, with a terminal's control characters written out."""
        printable = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
        lines = printable.splitlines()[:MAX_SHOWN_LINES]
        self._shown = Text("\n" if lines else "")
        for number, line in enumerate(lines):
            self._shown.append(f"\n{line}", "bold" if number == 0 else "")

    def log(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Takes over the figures of a finished step."""
        interval_s = self.pace.end_step(step, now)
        for column in self._columns.all:
            value = column.read(metrics)
            if value is not None:
                self._history.setdefault(column.name, []).append((step, value))
        # After the last step comes its validation: the phases shown stay the step's.
        if step < self.pace.num_steps or not self._last_step[0]:
            self._last_step = metrics, interval_s
        self._body_width = 0

    def close(self, now: float) -> None:
        self._closed_at = now

    def render(self, now: float, width: int = 120) -> Text:
        """The whole screen for a terminal of that width. Parts that don't fit go to a line of their own, or are cut."""
        text = Text(no_wrap=True, overflow="ellipsis")
        self._add_header(text, now, width)
        if self._closed_at is None:
            _add_parts(text.append(_label("now")), [Text(part) for part in self.pace.describe(now)], width)
        else:
            word = "done" if self.pace.num_done == self.pace.num_steps else "stopped"
            text.append(_label(word)).append(f"after {duration(self.pace.elapsed(self._closed_at))}")
        if self.pace.has_step and self._body_width != width:
            self._body, self._body_width = self._lay_out(*self._last_step, width), width
        return text.append_text(self._body).append_text(self._shown)

    def _add_header(self, text: Text, now: float, width: int) -> None:
        """Steps and the time left come first; the bar, then the title, make room for them."""
        num_done, num_steps = self.pace.num_done, self.pace.num_steps
        share = num_done / max(num_steps, 1)
        step, end = f"step {num_done}/{num_steps}  ", f"{share:.0%}  "
        left = self.pace.time_left(now) if self._closed_at is None else ""
        room = width - len(step) - len(end) - len(left)
        bar = min(room - len(self._title) - 4, _BAR_WIDTH)
        title = self._title if bar >= _MIN_BAR_WIDTH else self._title[: max(room - 2, 0)]
        text.append(f"{title}  " if title else "", "bold").append(step)
        if bar >= _MIN_BAR_WIDTH:
            filled = round(share * bar)
            text.append("━" * filled, "green").append("─" * (bar - filled), "dim").append("  ")
        text.append(end).append(left, "bold").append("\n")

    def _lay_out(self, metrics: Mapping[str, float], interval_s: float, width: int) -> Text:
        text = Text()
        for column in self._columns.trends:
            self._add_trend(text, column)
        self._add_trend(text, self._columns.validation)
        self._add_validation(text, width)
        text.append("\n").append(_label("details"))
        figures = [(c, last[-1][1]) for c in self._columns.details if (last := self._history.get(c.name)) is not None]
        _add_parts(text, [Text(f"{c.title} ", "dim").append(c.text(value), "not dim") for c, value in figures], width)
        self._add_phases(text, metrics, interval_s, width)
        return text

    def _add_trend(self, text: Text, column: MetricColumn) -> None:
        history = self._history.get(column.name)
        if history:
            text.append("\n").append(_label(column.title)).append(f"{column.text(history[-1][1]):<8}", "bold")
            text.append(sparkline([value for _, value in history], _BAR_WIDTH), "cyan")

    def _add_validation(self, text: Text, width: int) -> None:
        column = self._columns.validation
        history = self._history.get(column.name)
        if history:
            best_step, best = (min if self._columns.is_lower_better else max)(history, key=lambda point: point[1])
            best_text = f"best {column.text(best)} after {counted(best_step, 'step')}"
            _add_parts(text, [Text(part, "dim") for part in (f"first {column.text(history[0][1])}", best_text)], width)

    def _add_phases(self, text: Text, metrics: Mapping[str, float], interval_s: float, width: int) -> None:
        """The shares of the phases in the time since the step before; `total` and `wall` hold others."""
        times = {
            name.removeprefix("time/step_"): value
            for name, value in metrics.items()
            if name.startswith("time/step_") and name not in ("time/step_total", "time/step_wall")
        }
        whole = max(interval_s, sum(times.values()))
        if not whole:
            return
        shares = {name: value / whole for name, value in times.items() if value >= 0.01 * whole}
        for name in shares:
            self._styles.setdefault(name, _PHASE_STYLES[len(self._styles) % len(_PHASE_STYLES)])
        ends = [round(_BAR_WIDTH * sum([*shares.values()][: i + 1])) for i in range(len(shares))]
        bars = {name: end - begin for name, begin, end in zip(shares, [0, *ends], ends, strict=False)}
        text.append("\n").append(_label("time")).append(f"{f'{interval_s:.1f} s':<8}", "bold")
        for name, length in bars.items():
            text.append("█" * length, self._styles[name])
        text.append("░" * (_BAR_WIDTH - sum(bars.values())), "dim")
        parts = [Text(_spoken(name), self._styles[name]).append(f" {share:.0%}", "default") for name, share in shares.items()]
        _add_parts(text, parts, width)


def sparkline(values: Sequence[float], width: int) -> str:
    """The finite values from the first to the last as bars between their extremes, each the mean of its part where there are
    more than `width`.

    >>> sparkline([0.0, 1.0, 2.0, 3.0, 7.0], 8), sparkline([0.0, 0.0, 7.0, 7.0], 2), sparkline([2.0, float("nan"), 2.0], 8)
    ('▁▂▃▄█', '▁█', '▄▄')
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


def _add_parts(text: Text, parts: Sequence[Text], width: int) -> None:
    """Adds the parts to the last line, two columns apart, and starts a new line below the labels if the next one doesn't
    fit."""
    used = len(text.plain) - text.plain.rfind("\n") - 1
    for part in parts:
        gap = "" if used == _LABEL_WIDTH else "  "
        if used > _LABEL_WIDTH and used + len(gap) + len(part) > width:
            text.append(f"\n{'':<{_LABEL_WIDTH}}")
            used, gap = _LABEL_WIDTH, ""
        text.append(gap).append_text(part)
        used += len(gap) + len(part)


def _label(word: str) -> Text:
    return Text(f"{word:<{_LABEL_WIDTH}}", "dim")


def _spoken(phase: str) -> str:
    return phase.replace("_", " ")
