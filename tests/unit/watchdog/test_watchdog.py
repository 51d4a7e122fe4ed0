"""Waits that run past their deadlines: who is interrupted, how, and who is left alone."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from turnwise.data.tables import noting
from turnwise.errors import DeadlineError, EnvironmentFault
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.stacks import describe_calls, describe_stacks
from turnwise.runtime.watchdog import Watchdog


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    with Watchdog(grace_s=10.0, poll_s=0.01) as watchdog:
        yield watchdog


def sleep_for_ever() -> None:
    while True:
        time.sleep(0.5)


def try_again_for_ever() -> None:
    while True:
        try:
            sleep_for_ever()
        except Exception:
            continue


def compute_for_ever() -> None:
    while True:
        pass


def wait_for_ever() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("stuck", [sleep_for_ever, try_again_for_ever, compute_for_ever, wait_for_ever])
def test_a_call_that_blocks_is_interrupted_and_named(watchdog: Watchdog, stuck: Callable[[], None]) -> None:
    with (
        pytest.raises(EnvironmentFault) as caught,
        watchdog.waiting("an episode of Lake", "Stuck.step", 0.05, "env_step_timeout_s", EnvironmentFault),
    ):
        stuck()
    first, *stacks = str(caught.value).splitlines()
    assert (
        first
        == "an episode of Lake waited 0.05 s for Stuck.step; raise env_step_timeout_s if that may take longer"
    )
    assert stacks[0] == "  thread MainThread:" and any(f"in {stuck.__name__}:" in line for line in stacks)
    assert not any("thread watchdog" in line for line in stacks)


def test_of_nested_waits_the_one_that_is_past_its_deadline_ends(watchdog: Watchdog) -> None:
    outer, inner = (
        watchdog.waiting("outer", "inner", 0.05, "a"),
        watchdog.waiting("inner", "sleep", 60.0, "b"),
    )
    with pytest.raises(DeadlineError, match="outer waited"), outer, inner:
        sleep_for_ever()
    assert watchdog.innermost is None
    with watchdog.waiting("outer", "inner", 60.0, "a"), watchdog.waiting("middle", "inner", None, "m"):
        with (
            pytest.raises(DeadlineError, match="inner waited"),
            watchdog.waiting("inner", "sleep", 0.05, "b"),
        ):
            sleep_for_ever()
        assert watchdog.innermost is not None and watchdog.innermost.waiter == "middle"


def test_what_comes_back_late_by_itself_fails_too() -> None:
    unstarted = Watchdog()
    with (
        pytest.raises(DeadlineError, match=r"^x waited 0\.001 s for y; raise z"),
        unstarted.waiting("x", "y", 0.001, "z"),
    ):
        time.sleep(0.002)


@pytest.mark.parametrize("fault", [ValueError("own"), KeyboardInterrupt()])
def test_other_errors_pass(watchdog: Watchdog, fault: BaseException) -> None:
    with pytest.raises(type(fault)) as caught, watchdog.waiting("x", "y", 60.0, "z"):
        raise fault
    assert caught.value is fault


def test_ctrl_c_wins_over_a_deadline(watchdog: Watchdog) -> None:
    with pytest.raises(KeyboardInterrupt), watchdog.waiting("x", "y", 0.02, "z"):
        try:
            sleep_for_ever()
        finally:
            raise KeyboardInterrupt


def test_a_late_signal_harms_nobody(watchdog: Watchdog) -> None:
    ended = watchdog.waiting("x", "y", 60.0, "z")
    with ended:
        pass
    watchdog._pending = ended
    with watchdog.waiting("innocent", "y", 60.0, "z"):
        signal.raise_signal(signal.SIGUSR2)
        time.sleep(0.001)
    watchdog._pending = None
    signal.raise_signal(signal.SIGUSR2)


def test_waits_that_end_around_their_deadline_end_one_way_or_the_other() -> None:
    chance, ends = random.Random(0), {"in time": 0, "late": 0}
    with Watchdog(grace_s=10.0, poll_s=0.0005) as watchdog:
        for _ in range(300):
            try:
                with watchdog.waiting("x", "y", 0.002, "z"):
                    end = time.monotonic() + chance.uniform(0.0, 0.004)
                    while time.monotonic() < end:
                        pass
                ends["in time"] += 1
            except DeadlineError:
                ends["late"] += 1
            assert watchdog.innermost is None
            # What runs between two waits must never be hit.
            sum(range(200))
    assert min(ends.values()) > 0


def test_the_signal_is_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with Watchdog():
        assert signal.getsignal(signal.SIGUSR2) != before
    assert signal.getsignal(signal.SIGUSR2) == before


def test_the_signal_of_somebody_else_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        with Watchdog():
            signal.raise_signal(signal.SIGUSR2)
            assert seen == [signal.SIGUSR2], "what isn't the watchdog's is passed on"
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_wait_costs_a_handful_of_calls(watchdog: Watchdog) -> None:
    events: list[str] = []

    def measured() -> None:
        with watchdog.waiting("x", "y", 60.0, "z"):
            pass

    sys.setprofile(lambda frame, event, argument: events.append(event))
    measured()
    sys.setprofile(None)
    assert sum(event in ("call", "c_call") for event in events) <= 9


async def never() -> None:
    await asyncio.Event().wait()


def run(watchdog: Watchdog, main: Any, iteration_s: float | None = None) -> Any:
    with WatchedRunner(watchdog, iteration_s) as runner:
        return runner.run(main)


def test_awaiting_without_end_shows_what_each_task_awaits(watchdog: Watchdog) -> None:
    async def ask() -> None:
        async with watchdog.waiting(
            "conversation c", "inference replica 0 to answer", 0.05, "deadlines.request_s"
        ):
            await never()

    async def main() -> None:
        others = [asyncio.create_task(never(), name=f"other {index}") for index in range(20)]
        await asyncio.gather(ask(), *others)

    lines_before = describe_stacks(None).splitlines()
    with pytest.raises(DeadlineError) as caught:
        run(watchdog, main())
    text = str(caught.value)
    assert text.startswith(
        "conversation c waited 0.05 s for inference replica 0 to answer; raise deadlines.request_s"
    )
    assert "20 tasks, one of them other 0:" in text and "in ask: await never()" in text
    assert len(text.splitlines()) < 30 + len(lines_before)


def test_a_call_that_blocks_inside_an_awaiting_wait_is_interrupted(watchdog: Watchdog) -> None:
    async def main() -> None:
        async with watchdog.waiting("the pipeline", "the weights", 0.05, "deadlines.weights_s"):
            await asyncio.sleep(0)
            sleep_for_ever()

    with pytest.raises(DeadlineError, match="the pipeline waited") as caught:
        run(watchdog, main())
    assert "in sleep_for_ever" in str(caught.value)


def test_a_deadline_outside_ends_a_call_inside(watchdog: Watchdog) -> None:
    async def main() -> None:
        async with watchdog.waiting(
            "the rollouts", "an episode", 0.05, "episode_timeout_s", EnvironmentFault
        ):
            with watchdog.waiting("an episode", "step", 60.0, "env_step_timeout_s", EnvironmentFault):
                sleep_for_ever()

    with pytest.raises(EnvironmentFault, match="the rollouts waited"):
        run(watchdog, main())


def test_a_task_of_an_awaiting_wait_that_blocks_ends_that_wait(watchdog: Watchdog) -> None:
    async def child() -> None:
        async with watchdog.waiting("a weight update", "a replica", 60.0, "deadlines.request_s"):
            sleep_for_ever()

    async def main() -> None:
        async with watchdog.waiting("the pipeline", "the weights", 0.05, "deadlines.weights_s"):
            await asyncio.gather(child(), never())

    with pytest.raises(DeadlineError, match="the pipeline waited"):
        run(watchdog, main())


def test_a_task_outlives_the_wait_that_it_was_started_in(watchdog: Watchdog) -> None:
    async def child() -> str:
        await asyncio.sleep(0.6)
        async with watchdog.waiting("inner", "y", 60.0, "z"):
            time.sleep(0.05)
        return "done"

    async def main() -> str:
        async with watchdog.waiting("outer", "y", 0.5, "z"):
            task = asyncio.create_task(child())
        return await task

    assert run(watchdog, main()) == "done"


def test_whatever_blocks_the_event_loop_is_named(watchdog: Watchdog) -> None:
    async def rude() -> None:
        sleep_for_ever()

    async def main() -> None:
        task = asyncio.create_task(rude(), name="embedded server")
        await never()
        await task

    with pytest.raises(
        DeadlineError, match=r"the event loop waited 0\.1 s for a task that blocks it; raise deadlines.env_s"
    ) as caught:
        run(watchdog, main(), iteration_s=0.1)
    assert "thread MainThread in task 'embedded server':" in str(caught.value)


def test_a_loop_that_turns_may_run_for_long(watchdog: Watchdog) -> None:
    async def main() -> str:
        for _ in range(12):
            time.sleep(0.05)
            await asyncio.sleep(0.05)
        return "done"

    assert run(watchdog, main(), iteration_s=1.0) == "done"


def test_a_longer_deadline_of_its_own_holds_for_a_task_that_blocks(watchdog: Watchdog) -> None:
    async def main() -> str:
        async with watchdog.waiting("x", "y", 60.0, "z"):
            time.sleep(1.1)
        time.sleep(0.03)
        return "done"

    async def sync() -> str:
        with watchdog.waiting("x", "y", 60.0, "z"):
            time.sleep(1.1)
        time.sleep(0.03)
        return "done"

    assert run(watchdog, main(), iteration_s=1.0) == run(watchdog, sync(), iteration_s=1.0) == "done"


def test_cancelling_and_time_outs_of_others_pass(watchdog: Watchdog) -> None:
    async def wait(fault: BaseException | None) -> None:
        async with watchdog.waiting("x", "y", 60.0, "z"):
            if fault:
                raise fault
            await never()

    async def main() -> None:
        task = asyncio.create_task(wait(None))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError, match="socket"):
            await wait(TimeoutError("socket"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await wait(None)
        assert not watchdog.of_task

    run(watchdog, main())


def test_a_task_that_is_cancelled_while_its_deadline_passes_is_cancelled(watchdog: Watchdog) -> None:
    async def main() -> None:
        is_past = asyncio.Event()

        async def wait() -> None:
            async with watchdog.waiting("x", "y", 0.01, "z"):
                try:
                    await never()
                finally:
                    is_past.set()
                    await never()

        task = asyncio.create_task(wait())
        await is_past.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(watchdog, main())


def test_stacks_are_few_enough_to_be_read() -> None:
    # In a process of its own: threads that other tests have left behind would be shown too.
    code = """
import threading
import time
from turnwise.runtime.stacks import describe_stacks
from turnwise.runtime.threads import DaemonThread

idle = DaemonThread("idle")
end = time.monotonic() + 60
while "idle" in describe_stacks(None) and time.monotonic() < end:
    time.sleep(0.01)
stop = threading.Event()

def worker(depth):
    worker(depth - 1) if depth else stop.wait()

for index in range(21):
    threading.Thread(target=worker, args=(index % 7 * 3,), name=f"worker {index}", daemon=True).start()
print(describe_stacks(None))
"""
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert re.search(r"\n  and \d+ more threads", text)
    assert "idle" not in text, "a thread that waits for work tells nothing"
    assert "threads, one of them worker 0:" in text and "calls further out" in text
    assert len(text.splitlines()) < 50 and all(line.startswith("  ") for line in text.splitlines())


def test_an_error_shows_the_calls_of_users_code_only() -> None:
    def rows() -> Iterator[int]:
        raise ValueError("no row")
        yield 1

    with pytest.raises(ValueError, match="no row") as caught:
        list(noting(rows(), "reading rows"))
    calls = describe_calls(caught.value)
    assert (
        len(calls) == 2
        and all("test_watchdog.py" in call for call in calls)
        and "in rows: raise" in calls[-1]
    )


def test_ctrl_c_that_is_raised_in_a_task_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A second Ctrl-C is raised in a task if the trainer is waited for while episodes go on."""

    async def press() -> None:
        raise KeyboardInterrupt

    async def wait() -> None:
        pressing = asyncio.create_task(press())
        await asyncio.Event().wait()
        await pressing

    gc.collect()  # What other tests have left behind may log as it is deleted.
    caplog.clear()
    with WatchedRunner(Watchdog()) as runner, pytest.raises(KeyboardInterrupt):
        runner.run(wait())
    gc.collect()
    assert not caplog.records
