"""Trackers that write to a tracking library. Once a run has started, the library's errors and waits don't
stop the run."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnwise.errors import NotAvailableError
from turnwise.protocols import NO_TEXTS, StepTexts
from turnwise.runtime.step_numbers import split_by_step
from turnwise.runtime.threads import DaemonThread
from turnwise.spec import TRACKERS

logger = logging.getLogger(__name__)

START_S = 120.0
"""Seconds that a run waits for a library to start."""
WRITE_S = 1.0
"""Seconds that a run waits for a library to accept a step; all else happens while the run continues."""
CLOSE_S = 60.0
"""Seconds that a run waits for a library to end."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a library is told about a run when it starts."""

    folder: Path
    project: str
    """The experiment's name, `exp_name`; a tracker's own arguments may replace it."""
    name: str
    first_step: int = 0
    """The first step of a resumed run, from 0; 0 for a new run."""
    settings: Mapping[str, object] | None = None
    """Every resolved setting by its path, without `tracker_kwargs`, which may hold API keys."""


class Store(Protocol):
    """One run in a tracking library. Its methods are only called in the tracker's thread."""

    place: str
    """Where people find the run."""

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        text: str,
    ) -> None:
        """Writes metrics of a step, and a sample text unless it is empty. Steps count from 1; a validation
        has the number of steps that came before it. So the step of a call is that of the call before, or a
        later one."""

    def close(self) -> None: ...


class StoreTracker:
    """Writes to the store that `start` makes, in its own thread. The first failure is logged and turns the
    tracker off. Raises NotAvailableError if the store can't start; the message names the arguments with which
    it needs no network or login."""

    def __init__(self, name: str, start: Callable[[], Store]) -> None:
        self._name = name
        self._calls: deque[Future[None]] = deque()
        self._thread = DaemonThread(name)
        store = self._thread.start(start)
        wait([store], START_S)
        fault: BaseException | None = TimeoutError(f"it did not answer within {START_S:g} s")
        if store.done():
            fault = store.exception()
        if fault is not None:
            self._thread.end()
            advice = ""
            offline = TRACKERS[name].offline
            if offline:
                advice = f"; tracker_kwargs {{{name}: {{{offline}}}}} needs neither network nor login"
            raise NotAvailableError(
                f"track_with {name} can't start: {_described(fault)}{advice}, and without {name} in "
                "track_with the run keeps metrics.jsonl"
            )
        self._store: Store | None = store.result()
        self._closing = ExitStack()  # closes the store once, even if that raises
        self._closing.callback(self._store.close)
        logger.info("%s: %s", name, self._store.place)

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        texts: StepTexts = NO_TEXTS,
    ) -> None:
        """Queues the write and waits up to `WRITE_S` for it; doesn't wait if an earlier write is still
        running."""
        self._check_calls()
        if self._store is not None:
            call = self._thread.start(_write, self._store, step, metrics, texts.samples)
            self._calls.append(call)
            if len(self._calls) == 1:
                self._check_calls(WRITE_S)

    def close(self) -> None:
        if self._store is not None:
            self._calls.append(self._thread.start(self._closing.close))
            self._check_calls(CLOSE_S)
            if self._calls:
                logger.warning(
                    "%s did not take everything within %g s; metrics.jsonl has every step",
                    self._name,
                    CLOSE_S,
                )
            self._thread.end()
            self._store = None

    def _check_calls(self, timeout_s: float = 0.0) -> None:
        """Waits at most `timeout_s` seconds for the queued calls, then handles those that have ended."""
        wait(self._calls, timeout_s)
        while self._calls and self._calls[0].done():
            fault = self._calls.popleft().exception()
            if fault is not None and self._store is not None:
                self._turn_off(fault)

    def _turn_off(self, fault: BaseException) -> None:
        logger.warning(
            "%s gets nothing more: %s; metrics.jsonl has every step", self._name, _described(fault)
        )
        for call in self._calls:
            call.cancel()
        self._calls.clear()
        self._thread.start(self._closing.close)
        self._thread.end()
        self._store = None


def tracker_arguments(tracker_kwargs: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments of a tracker in a config's `tracker_kwargs`: under its name, or at the top level if only
    one tracker takes any.

    >>> tracker_arguments({"mode": "offline", "wandb": {"project": "lake"}}, "wandb")
    {'mode': 'offline', 'project': 'lake'}
    """
    top_level = {key: value for key, value in tracker_kwargs.items() if key not in TRACKERS}
    return {**top_level, **tracker_kwargs.get(name, {})}


def _write(
    store: Store,
    step: int,
    metrics: Mapping[str, float],
    text: str,
) -> None:
    """Writes a row of step `step` from 0 at the numbers that people see. The text is of the step's own
    episodes."""
    parts = split_by_step(step, metrics)
    if text:
        parts.setdefault(step + 1, {})
    for number, part in parts.items():
        store.write(number, part, text if number == step + 1 else "")


def _described(fault: BaseException) -> str:
    text = " ".join(str(fault).split())[:500]
    return f"{type(fault).__name__}: {text}".rstrip(".: ")
