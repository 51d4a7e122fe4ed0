"""The trackers of one run behind one `log`, and the clock of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from turnwise.protocols import Tracker
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import Metric


@dataclass(slots=True)
class Clock:
    """How long a phase took, 0 until it is over."""

    elapsed_s: float = 0.0


class RunLog:
    """Collects the metrics of a step, reduces them once and hands them to every tracker.

    >>> class Printer:
    ...     def log(self, step, metrics): print(step, metrics)
    ...     def close(self): pass
    >>> log = RunLog([Printer()])
    >>> log.add([Metric("rollout/score/mean", 1.0), Metric("rollout/score/mean", 0.0)])
    >>> log.end_step(0)
    0 {'rollout/score/mean': 0.5}
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._metrics: list[Metric] = []

    def add(self, metrics: Iterable[Metric]) -> None:
        self._metrics += metrics

    @contextmanager
    def phase(self, name: str) -> Iterator[Clock]:
        """Measures what runs inside as `time/step_{name}`, in seconds. The clock stands when the phase is over."""
        clock = Clock()
        start = time.perf_counter()
        yield clock
        clock.elapsed_s = time.perf_counter() - start
        self._metrics.append(Metric(f"time/step_{name}", clock.elapsed_s, "sum"))

    def end_step(self, step: int) -> None:
        reduced = reduce_metrics(self._metrics)
        self._metrics = []
        for tracker in self._trackers:
            tracker.log(step, reduced)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
