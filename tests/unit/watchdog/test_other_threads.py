"""Waits by `with` in other threads than the watched one: they change nothing for its own waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from turnwise.errors import DeadlineError
from turnwise.runtime.watchdog import Watchdog


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    with Watchdog(grace_s=10.0, poll_s=0.01) as watchdog:
        yield watchdog


def in_a_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_wait_of_another_thread_leaves_the_chain_of_the_watched_one_alone(watchdog: Watchdog) -> None:
    """As a replica that is started again in a thread while the run goes from one call to the next."""
    has_begun, may_end = threading.Event(), threading.Event()

    def start() -> None:
        with watchdog.waiting("the run", "an actor", 60.0, "deadlines.start_s"):
            has_begun.set()
            may_end.wait()

    with watchdog.waiting("the pipeline", "a step", 60.0, "deadlines.train_s"):
        thread = in_a_thread(start)
        has_begun.wait()
    may_end.set()
    thread.join()
    assert watchdog.innermost is None


def test_a_wait_of_another_thread_interrupts_nobody_and_fails_when_it_is_left(watchdog: Watchdog) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def start() -> None:
        try:
            with watchdog.waiting("the run", "an actor", 0.01, "deadlines.start_s"):
                has_begun.set()
                may_end.wait()
        except DeadlineError as error:
            errors.append(error)

    thread = in_a_thread(start)
    has_begun.wait()
    with watchdog.waiting("the pipeline", "a step", 60.0, "deadlines.train_s"):
        time.sleep(0.2)  # many looks of the watchdog
    may_end.set()
    thread.join()
    [error] = errors
    assert str(error).startswith("the run waited 0.01 s for an actor; raise deadlines.start_s")
