"""The trackers of one run behind one `log`, and the clock of its phases."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from turnwise.protocols import NO_TEXTS, StepTexts, Tracker
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.tracking.health import Health
from turnwise.tracking.metrics import reduce_metrics
from turnwise.tracking.shares import describe_shares, time_shares
from turnwise.types import Group, Metric

logger = logging.getLogger(__name__)

PUBLISHED_PHASES = {"ref_log_probs": "ref_log_probs_values_reward"}
"""Phase → its name in `time/step_…`, for phases that other systems' documents name differently."""


@runtime_checkable
class Watcher(Protocol):
    """A tracker that people watch live: `begin_phase` tells it that a phase of a step begins."""

    def begin_phase(self, name: str) -> None: ...


@dataclass(slots=True)
class PhaseTime:
    """How many seconds a phase took, 0 until the phase is over."""

    elapsed_s: float = 0.0


class RunLog:
    """Collects the metrics of a step, reduces them once and hands them to every tracker.

    With a `stopwatch`, which the parts of the run share, a step reports how its time was spent. With `health`
    it also reports what may be wrong.

    >>> class Printer:
    ...     def log(self, step, metrics, texts): print(step, metrics)
    ...     def close(self): pass
    >>> log = RunLog([Printer()])
    >>> log.add([Metric("rollout/score/mean", 1.0), Metric("rollout/score/mean", 0.0)])
    >>> _ = log.end_step(0)
    0 {'rollout/score/mean': 0.5}
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        stopwatch: Stopwatch | None = None,
        health: Health | None = None,
    ) -> None:
        self._trackers = trackers
        self.health = health
        self._stopwatch = stopwatch
        self._phases: dict[str, float] = {}
        self._totals: dict[str, float] = {}  # the stopwatch's totals when the step began
        self._step_began: float | None = None
        self._num_phases = 0
        self._watchers = [tracker for tracker in trackers if isinstance(tracker, Watcher)]
        self._metrics: list[Metric] = []
        self._texts = NO_TEXTS

    def add(self, metrics: Iterable[Metric]) -> None:
        self._metrics += metrics

    def show(self, brief: str, whole: str) -> None:
        """Sets the sample trajectories of the step that ends next, in brief and as a whole."""
        self._texts = StepTexts(brief=brief, samples=whole)

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseTime]:
        """Measures the seconds of the code inside as metric `time/step_{name}`; `PUBLISHED_PHASES` renames
        some phases. Afterwards the yielded PhaseTime has these seconds too."""
        for watcher in self._watchers:
            watcher.begin_phase(name)
        self._num_phases += 1
        number = self._num_phases
        clock = PhaseTime()
        start = Stopwatch.now()
        if self._step_began is None:
            self._begin_step(start)
        yield clock
        clock.elapsed_s = Stopwatch.now() - start
        if number == self._num_phases:  # no phase has begun inside
            self._phases[name] = self._phases.get(name, 0.0) + clock.elapsed_s
            if self._stopwatch is not None:
                self._stopwatch.add("pipeline", name, start)
        published_name = PUBLISHED_PHASES.get(name, name)
        self._metrics.append(Metric(f"time/step_{published_name}", clock.elapsed_s, "sum"))

    def end_step(self, step: int, groups: Sequence[Group] = ()) -> dict[str, float]:
        """Hands the step's metrics to the trackers and returns them; a sentence about the run's health may
        quote `groups`. The time that this call takes counts as a phase of the next step."""
        if self._stopwatch is not None and self._step_began is not None:
            self._add_shares(step, self._stopwatch, self._step_began)
        with self.phase("log"):
            reduced = reduce_metrics(self._metrics)
            self._metrics = []
            sentences: dict[str, str] = {}
            if self.health:
                sentences = self.health.see(step, reduced, groups)
                reduced |= {f"health/{condition}": 1.0 for condition in sentences}
                reduced |= self.health.measured()
            for sentence in sentences.values():
                logger.warning(sentence)
            texts = self._texts._replace(health=sentences)
            self._texts = NO_TEXTS
            for tracker in self._trackers:
                tracker.log(step, reduced, texts)
        return reduced

    def _begin_step(self, time_s: float) -> None:
        self._step_began = time_s
        self._phases = {}
        self._totals = {} if self._stopwatch is None else dict(self._stopwatch.totals)

    def _add_shares(self, step: int, stopwatch: Stopwatch, began: float) -> None:
        stopwatch.add("steps", f"step {step + 1}", began)
        totals = {
            track: seconds - self._totals.get(track, 0.0) for track, seconds in stopwatch.totals.items()
        }
        end = Stopwatch.now()
        elapsed_s = end - began
        shares = time_shares(elapsed_s, self._phases, totals)
        self._begin_step(end)
        self.add([Metric("time/step_wall", elapsed_s)])
        self.add(Metric(name, share) for name, share in shares.items())
        logger.info("step %d took %.2f s; %s", step + 1, elapsed_s, describe_shares(shares))

    def close(self) -> None:
        with ExitStack() as closing:
            if self._stopwatch is not None:
                closing.callback(self._stopwatch.close)
            for tracker in self._trackers:
                closing.callback(tracker.close)
