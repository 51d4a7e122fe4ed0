"""The last part of credit assignment, which all estimators share: whitening, clipping, and writing into the
samples."""

import numpy as np

from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.types import Metric


def write_advantages(tokens: ResponseTokens, advantages: Array, settings: AlgorithmSettings) -> list[Metric]:
    """Writes the `advantages` [R] of the batch's trained tokens into their samples, with 0 at every other
    token. If the settings ask for it, they are first whitened over all trained tokens, then clipped to
    ±`advantage_clip`."""
    if settings.whiten_advantages:
        advantages = whiten_all(advantages)
    advantages, metrics = clip("critic/advantage_clip_frac", advantages, settings.advantage_clip)
    for sample, array in zip(tokens.samples, tokens.scatter(advantages), strict=True):
        sample.advantages = array
    return metrics + summary("critic/advantages", advantages)


def whiten_all(x: Array) -> Array:
    """(x − μ) / sqrt(var + 1e-8) of `x` [R], with the unbiased variance; a single number stays unchanged.

    >>> whiten_all(np.array([1.0, 2.0, 3.0])).round(6).tolist()
    [-1.0, 0.0, 1.0]
    """
    if len(x) <= 1:
        return x
    std = np.sqrt(x.var(ddof=1) + 1e-8)
    return (x - x.mean()) / std


def clip(metric: str, values: Array, bound: float | None) -> tuple[Array, list[Metric]]:
    """`values` clipped to ±`bound`, and the clipped share as `metric`; unchanged and without a metric if
    `bound` is None."""
    if bound is None or not len(values):
        return values, []
    is_clipped = np.abs(values) > bound
    clipped_share = Metric(metric, float(is_clipped.mean()), weight=len(values))
    return values.clip(-bound, bound), [clipped_share]


def summary(name: str, values: Array) -> list[Metric]:
    """Mean, maximum and minimum of `values` as `name/mean`, `name/max`, `name/min`; none if there are no
    values."""
    count = len(values)
    if not count:
        return []
    mean = float(values.mean())
    highest = float(values.max())
    lowest = float(values.min())
    return [
        Metric(f"{name}/mean", mean, "mean", weight=count),
        Metric(f"{name}/max", highest, "max"),
        Metric(f"{name}/min", lowest, "min"),
    ]
