"""Progress of a run's current phase, and the duration of the run's steps. This module reads no clock: callers
pass times."""

import logging

from turnwise.costs.model import share_done, steps_left_s, work_left_s
from turnwise.runtime.stopwatch import Stopwatch, Work

logger = logging.getLogger(__name__)

LONG_STEP_S = 120.0
"""If the first step takes longer than this, or is estimated to, a warning advises how to make steps
shorter."""
_SURE_S = 15.0  # the advice relies on a phase only after it has lasted this long
_NUM_RECENT = 20
_BESIDE_STEPS = ("val", "checkpoint", "model_update", "log")
"""Phases that not every step has, or that take no time."""


class Pace:
    """The steps of a run and its current phase. Times are seconds of any clock, passed in by the caller.
    `stopwatch` knows the work of the phase. `tokens_per_episode` is the most that an episode can sample, 0 if
    unknown. `advice` says how to make steps shorter; it is logged at most once, if the first step takes
    longer than `LONG_STEP_S`."""

    def __init__(
        self,
        num_steps: int,
        num_done: int = 0,
        stopwatch: Stopwatch | None = None,
        tokens_per_episode: int = 0,
        advice: str = "",
    ) -> None:
        self.num_steps = num_steps
        self.num_done = num_done
        self.phase = ""
        self._stopwatch = stopwatch or Stopwatch()
        self._tokens_per_episode = tokens_per_episode
        self._advice = advice
        self._phase_began = 0.0
        self._num_sampled = 0  # tokens that were sampled before the phase began
        self._step_began: float | None = None
        self._ends: list[float] = []  # when the run started, and when each step ended

    def begin_phase(self, name: str, time_s: float) -> None:
        """Begins a phase. The run's time counts from its first phase."""
        if not self._ends:
            self._ends.append(time_s)
        if self._step_began is None and name not in _BESIDE_STEPS:
            self._step_began = time_s
        self.phase = name
        self._phase_began = time_s
        self._stopwatch.work = Work()
        self._num_sampled = self._stopwatch.num_sampled

    def end_step(self, step: int, time_s: float) -> float:
        """Notes the end of a step. Returns the seconds since the previous step ended, or since the first
        phase began."""
        self._ends.append(time_s)
        self.num_done = min(step + 1, self.num_steps)
        self._step_began = None
        if not self.has_step:
            return 0.0
        return time_s - self._ends[-2]

    def elapsed(self, time_s: float) -> float:
        """Seconds since the first phase began."""
        if not self._ends:
            return 0.0
        return time_s - self._ends[0]

    @property
    def has_step(self) -> bool:
        """Whether a step has ended."""
        return len(self._ends) > 1

    def describe(self, time_s: float) -> list[str]:
        """The phase, its time, and the progress, speed and remaining time of its work, as far as known."""
        work = self._stopwatch.work
        elapsed_s = time_s - self._phase_began
        parts = [f"{self._phase_text} {elapsed_s:.1f} s"]
        if not work.total:
            return parts
        parts.append(f"{min(work.num_done, work.total)}/{work.total} {work.unit}")
        tokens = self._num_tokens
        if tokens and elapsed_s:
            parts.append(f"{tokens:,} tokens, {tokens / elapsed_s:,.0f}/s")
        remaining_s = self._phase_left(time_s)
        if remaining_s:
            bound = "at most " if work.unit == "episodes" else ""
            parts.append(f"{bound}{duration(remaining_s)} more")
        return parts

    def time_left(self, time_s: float) -> str:
        """The time left as text, estimated from the intervals between recent steps, which include validations
        and checkpoints. Before the first step has ended, it is estimated from the step's progress."""
        num_left = self.num_steps - self.num_done
        if num_left <= 0:
            return ""
        if self.has_step:
            recent = self._ends[-_NUM_RECENT - 1 :]
            return f"{duration(steps_left_s(recent, num_left, time_s))} left"
        step_s = self._first_step_s(time_s)
        if step_s is None or self._step_began is None:
            return "time left unknown"
        remaining_s = max(step_s * num_left - (time_s - self._step_began), 0.0)
        if self.phase == "train":
            return f"about {duration(remaining_s)} left"
        return f"about {duration(remaining_s)} + training left"

    def advise(self, time_s: float) -> None:
        """Logs `advice` once, if the first step took longer than `LONG_STEP_S`, or is estimated to do so."""
        if self.has_step:
            step_s = self._ends[1] - self._ends[0]
            subject = "the first step took"
        else:
            estimate = self._first_step_s(time_s)
            if estimate is None or time_s - self._phase_began < _SURE_S:
                return
            step_s = estimate
            subject = f"up to the end of its {self._phase_text} a step takes about"
        if self._advice and step_s > LONG_STEP_S:
            logger.warning("%s %s; %s", subject, duration(step_s), self._advice)
        if step_s > LONG_STEP_S or self.has_step:
            self._advice = ""

    @property
    def _phase_text(self) -> str:
        return self.phase.replace("_", " ")

    @property
    def _num_tokens(self) -> int:
        work = self._stopwatch.work
        if work.unit == "episodes":
            return self._stopwatch.num_sampled - self._num_sampled
        return work.tokens

    def _phase_left(self, time_s: float) -> float | None:
        """Estimate of the seconds left in the phase, None if unknown. While episodes play, the phase may well
        end earlier."""
        work = self._stopwatch.work
        elapsed_s = time_s - self._phase_began
        max_tokens = work.total * self._tokens_per_episode if work.unit == "episodes" else 0
        share = share_done(work.num_done, work.total, self._num_tokens, max_tokens)
        if not share or elapsed_s < 1.0:
            return None
        return work_left_s(elapsed_s, share)

    def _first_step_s(self, time_s: float) -> float | None:
        phase_left_s = self._phase_left(time_s)
        if self._step_began is None or phase_left_s is None or self.phase in _BESIDE_STEPS:
            return None
        return time_s - self._step_began + phase_left_s


def duration(seconds: float) -> str:
    """A time as minutes:seconds, or hours:minutes:seconds.

    >>> duration(65), duration(3 * 3600 + 125)
    ('1:05', '3:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"
