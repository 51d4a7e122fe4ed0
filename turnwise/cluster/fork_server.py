"""Processes that start in milliseconds: copies of one that has imported what they need, and holds no threads, locks or devices.

Light to import, so that the imports of that one run beside those of the process that asks for it.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from types import ModuleType

CONTEXT = multiprocessing.get_context("forkserver")
ENDS_A_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a shell or a scheduler sends to all processes of a run: what becomes of the others is the first one's choice."""


def prepare_processes(modules: Sequence[str]) -> None:
    """Begins to import modules for later processes, unless a server of them is there already."""
    with without_main():
        CONTEXT.set_forkserver_preload(list(modules))
        _ensure_running()


def start_process(process: multiprocessing.context.ForkServerProcess) -> None:
    """Starts a process of CONTEXT."""
    with without_main():
        _ensure_running()
        process.start()


def _ensure_running() -> None:
    # Ctrl-C while it imports would end it with a traceback of its own. The tracker's start unblocks signals: it comes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS_A_GROUP)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_main() -> Iterator[None]:
    """A process that is started inside doesn't import this one's script, which would run again where nothing guards it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
