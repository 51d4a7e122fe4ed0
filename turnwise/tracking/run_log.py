"""The trackers of one run behind one `log`, and the clock of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from turnwise.protocols import Tracker
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import Metric


@runtime_checkable
class Watcher(Protocol):
    """What a tracker for people adds: it is told within a step what goes on."""

    def begin_phase(self, name: str) -> None: ...

    def show(self, text: str) -> None:
        """Shows a few lines until the next ones come."""
        ...


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
        self._watchers = [tracker for tracker in trackers if isinstance(tracker, Watcher)]
        self._metrics: list[Metric] = []

    def add(self, metrics: Iterable[Metric]) -> None:
        self._metrics += metrics

    def show(self, text: str) -> None:
        """Lines for people who look on; nothing keeps them."""
        for watcher in self._watchers:
            watcher.show(text)

    @contextmanager
    def phase(self, name: str) -> Iterator[Clock]:
        """Measures what runs inside as `time/step_{name}`, in seconds. The clock stands when the phase is over."""
        for watcher in self._watchers:
            watcher.begin_phase(name)
        clock = Clock()
        start = time.perf_counter()
        yield clock
        clock.elapsed_s = time.perf_counter() - start
        self._metrics.append(Metric(f"time/step_{name}", clock.elapsed_s, "sum"))

    def end_step(self, step: int) -> None:
        """Hands out the metrics of the step. How long that takes is a phase of the next one."""
        with self.phase("log"):
            reduced = reduce_metrics(self._metrics)
            self._metrics = []
            for tracker in self._trackers:
                tracker.log(step, reduced)

    def close(self) -> None:
        with ExitStack() as rest:
            for tracker in self._trackers:
                rest.callback(tracker.close)
