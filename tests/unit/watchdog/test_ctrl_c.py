"""Ctrl-C while an event loop starts."""

from __future__ import annotations

import asyncio
import gc
import signal
import warnings

import pytest

from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog


def test_what_ctrl_c_keeps_from_beginning_is_no_coroutine_that_was_never_awaited():
    gc.collect()  # What other tests have left behind may warn as it is deleted.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        runner = WatchedRunner(Watchdog())
        loop = runner._runner.get_loop()
        # Twice, as the first one only cancels: before the loop has come to the first step of its main task.
        loop.call_soon(signal.raise_signal, signal.SIGINT)
        loop.call_soon(signal.raise_signal, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            runner.run(asyncio.sleep(0))
        runner.close()
        gc.collect()
    assert [str(warning.message) for warning in warned if "never awaited" in str(warning.message)] == []


def test_a_ctrl_c_that_comes_while_the_handler_is_set_up_is_no_cancellation(monkeypatch):
    """asyncio sets its count of Ctrl-Cs to 0 after it has installed the handler that counts them."""
    install = signal.signal

    def installed(number, handler):
        before = install(number, handler)
        if handler is not before and callable(handler) and handler is not signal.default_int_handler:
            signal.raise_signal(number)
        return before

    runner = WatchedRunner(Watchdog())
    monkeypatch.setattr(signal, "signal", installed)
    with pytest.raises(KeyboardInterrupt):
        runner.run(asyncio.sleep(0))
    monkeypatch.undo()
    runner.close()
