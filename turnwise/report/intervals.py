"""Confidence intervals of success rates."""

from __future__ import annotations

import math


def wilson_interval(num_successes: int, num_trials: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a proportion, by default at 95%.

    Wilson 1927: (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n). Unlike p ± z·σ it stays inside [0, 1].

    >>> [round(x, 4) for x in wilson_interval(850, 1000)]
    [0.8265, 0.8708]
    >>> wilson_interval(0, 0)
    (0.0, 1.0)
    """
    if num_trials == 0:
        return 0.0, 1.0
    p, n = num_successes / num_trials, num_trials
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
