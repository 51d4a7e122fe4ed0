"""The one place where measurements are combined."""

from __future__ import annotations

from collections.abc import Iterable

from turnwise.types import Metric, Reduction


def reduce_metrics(metrics: Iterable[Metric]) -> dict[str, float]:
    """One number a name, in the order in which names first appear: Σ weight·value / Σ weight for a `mean`, and the sum,
    maximum, minimum or last of the values otherwise.

    A measurement of weight 0 (a micro-batch without trained tokens) doesn't count; a name that has no other is left out.
    Tensors are read here and only here, so producers don't wait for a device.

    >>> loss = [Metric("loss", 1.0, weight=3), Metric("loss", 5.0, weight=1)]
    >>> reduce_metrics([*loss, Metric("ratio_max", 2.0, "max"), Metric("ratio_max", 7.0, "max")])
    {'loss': 2.0, 'ratio_max': 7.0}

    Raises:
        ValueError: one name with two reductions.
    """
    collected: dict[str, list[tuple[float, float]]] = {}
    reductions: dict[str, Reduction] = {}
    for metric in metrics:
        reduction = reductions.setdefault(metric.name, metric.reduction)
        if reduction != metric.reduction:
            raise ValueError(f"metric {metric.name!r} is reduced by both {reduction!r} and {metric.reduction!r}; use two names")
        weight = float(metric.weight)
        measurements = collected.setdefault(metric.name, [])
        if weight != 0.0:
            measurements.append((float(metric.value), weight))
    return {name: _reduce(measurements, reductions[name]) for name, measurements in collected.items() if measurements}


def _reduce(measurements: list[tuple[float, float]], reduction: Reduction) -> float:
    values = [value for value, _ in measurements]
    if reduction == "mean":
        return sum(value * weight for value, weight in measurements) / sum(weight for _, weight in measurements)
    if reduction == "sum":
        return sum(values)
    if reduction == "max":
        return max(values)
    if reduction == "min":
        return min(values)
    return values[-1]
