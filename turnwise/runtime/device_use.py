"""For how long each device of a run computes nothing."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class DeviceUse:
    """Measures the idle share of each device: of the time in which no work that was announced for it runs.
    `now` returns seconds.

    >>> clock = iter([0.0, 1.0, 3.0, 4.0])
    >>> use = DeviceUse([0, 1], lambda: next(clock))
    >>> with use.using([0]):
    ...     pass
    >>> use.idle_shares()
    {0: 0.5, 1: 1.0}
    """

    def __init__(self, devices: Iterable[int], now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._num_running = dict.fromkeys(sorted(devices), 0)
        self._busy_s = dict.fromkeys(self._num_running, 0.0)
        self._changed = now()
        self._started = self._changed

    @contextmanager
    def using(self, devices: Iterable[int]) -> Iterator[None]:
        """In this context work runs on these devices. Several contexts may overlap. Devices that aren't
        measured are passed over."""
        numbers = [device for device in devices if device in self._num_running]
        self._advance()
        for device in numbers:
            self._num_running[device] += 1
        try:
            yield
        finally:
            self._advance()
            for device in numbers:
                self._num_running[device] -= 1

    def idle_shares(self) -> dict[int, float]:
        """The share of each device since the last call, from 0 to 1; of one in use all the time 0."""
        self._advance()
        elapsed_s = max(self._changed - self._started, 1e-9)
        shares = {device: 1.0 - busy_s / elapsed_s for device, busy_s in self._busy_s.items()}
        self._started = self._changed
        self._busy_s = dict.fromkeys(self._busy_s, 0.0)
        return shares

    def _advance(self) -> None:
        now = self._now()
        for device, number in self._num_running.items():
            if number:
                self._busy_s[device] += now - self._changed
        self._changed = now
