"""What can't be interrupted ends its process, and what was left behind in threads doesn't keep one from
ending."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import asyncio, ctypes, signal, threading, time
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog
watchdog = Watchdog(grace_s=0.3, stall_s=0.5)
def stuck(call):
    watchdog.start()
    with watchdog.waiting("the pipeline", "actor_train.train_step", 0.1, "deadlines.train_s"):
        call()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "code",
    [
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}); stuck(lambda: time.sleep(60))",
        "thread = threading.Thread(target=stuck, args=(lambda: time.sleep(60),)); thread.start(); "
        "thread.join()",
    ],
    ids=["a call that no signal reaches", "off the main thread"],
)
def test_what_does_not_come_back_ends_the_process_with_the_same_error(code: str) -> None:
    done = run(code)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: the pipeline waited 0.1 s for actor_train.train_step; raise deadlines.train_s"
    )
    assert "in stuck" in done.stderr
    assert "it didn't come back within 0.3 s of being interrupted: the process ends" in done.stderr


def test_c_code_that_keeps_pythons_lock_ends_the_process_with_stacks() -> None:
    done = run("stuck(lambda: ctypes.PyDLL(None).sleep(60))")
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in stuck" in done.stderr


def test_a_call_left_in_a_thread_does_not_keep_the_process() -> None:
    done = run("""
async def main():
    async with watchdog.waiting("x", "y", 0.1, "z"):
        await asyncio.to_thread(threading.Event().wait)
try:
    with WatchedRunner(watchdog, 5.0) as runner:
        runner.run(main())
except TimeoutError as error:
    print(error)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("x waited 0.1 s for y") and "thread to_thread:" in done.stdout
