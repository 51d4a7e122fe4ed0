"""From a pipeline to its end: whatever ends a run early, what it has learnt is saved first."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from turnwise.errors import CheckpointError, TurnwiseError
from turnwise.pipelines.interrupt import Interrupts
from turnwise.pipelines.run_folder import RunFolder


class Pipeline(Protocol):
    """What a session runs: training in steps, of which `num_done` are whole."""

    interrupts: Interrupts
    num_done: int

    def run(self) -> None: ...

    def do_checkpoint(self) -> Path: ...

    def close(self) -> None: ...


P = TypeVar("P", bound=Pipeline)


def run_to_end(folder: RunFolder, build: Callable[[], P]) -> P:
    """Builds a pipeline, runs and closes it. After Ctrl-C, SIGTERM or an error the last whole step is saved, and where is said;
    a start that fails leaves no folder.

    Raises:
        KeyboardInterrupt: the run was interrupted; it is saved.
        TurnwiseError: what ended the run; it is saved.
    """
    with ExitStack() as start_that_failed:
        start_that_failed.callback(folder.discard)
        pipeline = build()
        start_that_failed.pop_all()
    start = pipeline.num_done
    try:
        with _terminate_like_interrupt():
            pipeline.run()
    except (KeyboardInterrupt, TurnwiseError) as fault:
        if pipeline.num_done > start and not isinstance(fault, CheckpointError):
            print(_save(pipeline), file=sys.stderr, flush=True)
        raise
    finally:
        pipeline.close()
    return pipeline


def _save(pipeline: Pipeline) -> str:
    if pipeline.interrupts.is_held:
        return (
            f"stopped in the middle of a weight update, after {pipeline.num_done} whole steps: nothing is saved of this one. "
            "Go on from the newest checkpoint with resume_from_checkpoint=true"
        )
    try:
        folder = pipeline.do_checkpoint()
    except TurnwiseError as fault:
        return f"the run's last step could not be saved: {fault}"
    return f"saved {pipeline.num_done} steps: {folder}\ngo on with resume_from_checkpoint=true"


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """Schedulers of clusters end a job by SIGTERM; it is saved like after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
