"""Confidence intervals of success rates."""

import math
from collections.abc import Sequence


def wilson_interval(
    num_successes: float,
    num_trials: float,
    z: float = 1.959964,
) -> tuple[float, float]:
    """The Wilson score interval of a proportion, by default at 95%.

    Wilson 1927: (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n). Unlike p ± z·σ it stays inside [0, 1].

    >>> [round(x, 4) for x in wilson_interval(850, 1000)]
    [0.8265, 0.8708]
    >>> wilson_interval(0, 0)
    (0.0, 1.0)
    """
    if num_trials == 0:
        return 0.0, 1.0
    n = num_trials
    p = min(max(num_successes / n, 0.0), 1.0)
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = (centre - half) / scale
    high = (centre + half) / scale
    return max(0.0, low), min(1.0, high)


def clustered_interval(
    num_successes: Sequence[int], num_trials: Sequence[int], z: float = 1.959964
) -> tuple[float, float]:
    """The interval of a success rate over tasks that were each tried several times, by default at 95%.

    Trials of one task resemble each other, so they count for less than trials of different tasks. This is the
    Wilson interval of an effective number of trials: p(1−p)/V, where V is the variance of the rate with tasks
    as clusters (Kish 1965, Survey Sampling, ch. 5), but no fewer than the tasks and no more than the trials.
    With one trial per task it is `wilson_interval`.

    >>> clustered_interval([1, 0, 1], [1, 1, 1]) == wilson_interval(2, 3)
    True
    >>> same = clustered_interval([4, 0] * 10, [4, 4] * 10)
    >>> mixed = clustered_interval([2, 2] * 10, [4, 4] * 10)
    >>> same == wilson_interval(10, 20), mixed == wilson_interval(40, 80)
    (True, True)
    """
    num_tasks = len(num_trials)
    total = sum(num_trials)
    if total == 0:
        return 0.0, 1.0
    p = sum(num_successes) / total
    squares = sum((c - p * n) ** 2 for c, n in zip(num_successes, num_trials, strict=True))
    variance = squares / total**2 * num_tasks / max(num_tasks - 1, 1)
    if p in (0.0, 1.0):
        # All trials have the same result, so the resemblance within a task is unknown.
        num_effective = float(num_tasks)
    elif variance:
        num_effective = p * (1 - p) / variance
    else:
        num_effective = float(total)
    num_effective = min(max(num_effective, num_tasks), total)
    return wilson_interval(p * num_effective, num_effective, z)
