"""Runs that something ends in the middle of a phase."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.config import AgenticConfig
from turnwise.examine.examined import examine
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.lifecycle.session import run_to_end
from turnwise.tracking.run_log import PhaseTime, RunLog


def press_ctrl_c() -> None:
    random.random()  # A user's code in the rollouts may draw.
    signal.raise_signal(signal.SIGINT)


class Disturbing(RunLog):
    """A log that does something when a phase begins for the `times`-th time."""

    def __init__(self, log: RunLog, phase: str, times: int, disturb: Callable[[], None]) -> None:
        vars(self).update(vars(log))
        self._phase, self._num_left, self._disturb = phase, times, disturb

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseTime]:
        with super().phase(name) as clock:
            self._num_left -= name == self._phase
            if name == self._phase and self._num_left == 0:
                self._disturb()
            yield clock


def interrupted(
    config: AgenticConfig,
    phase: str,
    error: type[BaseException] = KeyboardInterrupt,
    disturb: Callable[[], None] = press_ctrl_c,
    message: str | None = None,
    times: int = 3,
) -> RunFolder:
    """A run that `disturb` ends with an error, when a phase has begun for the `times`-th time."""
    folder = start_run(config)
    pipeline = build_agentic(examine(config), folder)
    pipeline.log = Disturbing(pipeline.log, phase, times, disturb)
    with pytest.raises(error, match=message):
        run_to_end(folder, lambda: pipeline)
    return folder
