"""Ctrl-C: a run ends where a step is whole, with everything up to there saved."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Holds Ctrl-C back while a step changes weights, and lets it through everywhere else.

    Between `hold` and `release` the first Ctrl-C is remembered and raised by `release`, when the step is whole; a second one
    is raised at once and leaves `is_held` True: weights may be half changed. Outside it comes as Python's KeyboardInterrupt,
    which asyncio turns into an orderly end of the episodes in flight. Off the main thread, where Python delivers no signals,
    both do nothing but keep `is_held`.
    """

    def __init__(self) -> None:
        self.is_held = False
        self._is_pressed = False
        self._previous: Any = None

    def hold(self) -> None:
        """From here on Ctrl-C waits for `release`."""
        self.is_held, self._is_pressed = True, False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._remember)

    def release(self) -> None:
        """The step is whole.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed since `hold`.
        """
        self.is_held = False
        self.restore()
        if self._is_pressed:
            raise KeyboardInterrupt

    def restore(self) -> None:
        """Gives the signal back to who had it, on every path out of a run."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self._is_pressed:
            raise KeyboardInterrupt
        self._is_pressed = True
        print("\nfinishing this step, then saving; Ctrl-C again drops it", file=sys.stderr, flush=True)
