"""Statistics over all values so far, without storing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RunningMoments:
    """Weighted count, mean and unbiased standard deviation of all values since the run began; they travel in the checkpoint.

    Batches are merged by their moments, which avoids cancellation (Welford 1962; Chan, Golub & LeVeque 1983,
    "Algorithms for Computing the Sample Variance", eq. 2.1).

    >>> running = RunningMoments()
    >>> running.update(np.array([1.0, 2.0]))
    >>> running.update(np.array([6.0]))
    >>> running.count, running.mean, round(running.std, 6)
    (3.0, 3.0, 2.645751)
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """Standard deviation; 0 for at most one value."""
        return float(np.sqrt(self._squares / (self.count - 1.0))) if self.count > 1.0 else 0.0

    def update(self, values: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> None:
        """Adds `values` [T]; `weights` [T], default 1, count how often each was seen."""
        weight = np.ones(len(values)) if weights is None else weights
        added = float(weight.sum())
        if added == 0.0:
            return
        mean = float((weight * values).sum()) / added
        total, shift = self.count + added, mean - self.mean
        self._squares += float((weight * (values - mean) ** 2).sum()) + shift**2 * self.count * added / total
        self.mean += shift * added / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self._squares = state["count"], state["mean"], state["squares"]


class RunningParts:
    """Several statistics by name, saved and restored together."""

    def __init__(self, parts: Mapping[str, RunningMoments]) -> None:
        self._parts = dict(parts)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
