"""Curves of metrics as points, `(step, value)`."""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from turnwise.runtime.step_numbers import shown_step

Row = Mapping[str, float]
Point = tuple[float, float]

MIN_SMOOTHED = 20
"""Minimum number of points of a curve that is smoothed."""


def metric_series(rows: Sequence[Row], pattern: str) -> list[Point]:
    """`(step, mean)` of each row's finite metrics whose names match the pattern. Rows without such a metric
    are left out. Steps count from 1. A row of step n from 0 has the validation after n steps, which is shown
    there."""
    points = []
    for row in rows:
        matching = [value for name, value in row.items() if re.fullmatch(pattern, name)]
        values = [value for value in matching if math.isfinite(value)]
        if values:
            points.append((row["step"], _mean(values)))
    return counted(points, pattern)


def counted(points: Sequence[Point], metric: str = "") -> list[Point]:
    """The points of a metric with steps that count from 1, as people see them; in `metrics.jsonl` they count
    from 0. There a validation after n steps stands in the row of step n, so its points stay as they are."""
    return [(shown_step(step, metric), value) for step, value in points]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Means over windows that reach a twentieth of the run (1 to 10 points) to both sides. The curve ends
    where its window does: one that shrank at the end would show the noise of the last step as a result. Few
    points stay as they are."""
    if len(points) < MIN_SMOOTHED:
        return list(points)
    reach = min(len(points) // 20, 10)
    means = []
    for middle in range(reach, len(points) - reach):
        window = [value for _, value in points[middle - reach : middle + reach + 1]]
        step, _ = points[middle]
        means.append((step, _mean(window)))
    return means


def values_by_step(curves: Sequence[Sequence[Point]]) -> dict[float, list[float]]:
    """Step → the values of the curves that have begun and not ended there, for each step that one of them
    has. Between its own steps a curve is a straight line: runs may be validated at different steps."""
    steps = sorted({step for curve in curves for step, _ in curve})
    values: dict[float, list[float]] = {step: [] for step in steps}
    for curve in curves:
        if not curve:
            continue
        own_steps, own_values = columns(curve)
        for step in steps:
            if own_steps[0] <= step <= own_steps[-1]:
                values[step].append(float(np.interp(step, own_steps, own_values)))
    return values


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of the curves at each step that one of them has."""
    values = values_by_step(curves)
    return [(step, _mean(values[step])) for step in sorted(values)]


def columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    steps = [step for step, _ in points]
    values = [value for _, value in points]
    return steps, values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
