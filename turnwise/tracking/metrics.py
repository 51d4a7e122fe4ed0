"""Combines metrics; no other module does."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.types import Metric, PooledReduction, Reduction

_COMBINE: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "last": operator.itemgetter(-1),
}


def reduce_metrics(metrics: Iterable[Metric]) -> dict[str, float]:
    """One number per name, in the order in which names first appear: Σ weight·value / Σ weight for a `mean`,
    and the sum, maximum, minimum or last of the values otherwise. `p99` and `ess` pool the arrays of all
    measurements first.

    Measurements of weight 0 (micro-batches without trained tokens) don't count. A name that has no others is
    left out. Tensors are read here and only here, so producers don't wait for a device.

    >>> loss = [Metric("loss", 1.0, weight=3), Metric("loss", 5.0, weight=1)]
    >>> reduce_metrics([*loss, Metric("ratio_max", 2.0, "max"), Metric("ratio_max", 7.0, "max")])
    {'loss': 2.0, 'ratio_max': 7.0}
    >>> reduce_metrics([Metric("ess", np.array([1.0, 1.0]), "ess"), Metric("ess", np.array([2.0]), "ess")])
    {'ess': 0.8888888888888888}
    """
    collected: dict[str, list[tuple[Any, float]]] = {}
    reductions: dict[str, Reduction | PooledReduction] = {}
    for metric in metrics:
        reduction = reductions.setdefault(metric.name, metric.reduction)
        if reduction != metric.reduction:
            raise ValueError(
                f"metric {metric.name!r} is reduced by both {reduction!r} and {metric.reduction!r}; use two "
                "names"
            )
        weight = float(metric.weight)
        measurements = collected.setdefault(metric.name, [])
        if weight != 0.0:
            measurements.append((metric.value, weight))
    return {
        name: _reduce(measurements, reductions[name])
        for name, measurements in collected.items()
        if measurements
    }


def _reduce(measurements: Sequence[tuple[Any, float]], reduction: Reduction | PooledReduction) -> float:
    if reduction == "p99":
        return float(np.percentile(_pooled(measurements), 99))
    if reduction == "ess":
        ratios = _pooled(measurements)
        squares = np.square(ratios)
        return float(ratios.sum() ** 2 / (len(ratios) * squares.sum()))
    values = [float(value) for value, _ in measurements]
    if reduction == "mean":
        weights = [weight for _, weight in measurements]
        weighted = [value * weight for value, weight in zip(values, weights, strict=True)]
        return sum(weighted) / sum(weights)
    return _COMBINE[reduction](values)


def _pooled(measurements: Sequence[tuple[Any, float]]) -> NDArray[np.float64]:
    """All values of the measurements as one array. `tolist` reads tensors of any device, without importing
    torch."""
    arrays = [np.asarray(value.tolist(), np.float64) for value, _ in measurements]
    return np.concatenate(arrays)
