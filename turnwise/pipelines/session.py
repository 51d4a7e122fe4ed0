"""From a pipeline to its end: whatever ends a run early, what it has learnt is saved first."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from turnwise.errors import CheckpointError
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
    """Builds a pipeline, runs and closes it. After Ctrl-C, SIGTERM or any error its whole steps are saved, and where is said;
    a start that fails leaves no folder.

    Raises:
        KeyboardInterrupt: the run was interrupted.
        TurnwiseError: what ended the run.
    """
    with ExitStack() as start_that_failed:
        start_that_failed.callback(folder.discard)
        pipeline = build()
        start_that_failed.pop_all()
    with ExitStack() as on_the_way_out:
        on_the_way_out.callback(pipeline.close)
        on_the_way_out.push(partial(_save_unfinished, pipeline, pipeline.num_done))
        with _terminate_like_interrupt():
            pipeline.run()
    return pipeline


def _save_unfinished(pipeline: Pipeline, start: int, kind: object, fault: BaseException | None, trace: object) -> None:
    """Where something ended the run: saves its whole steps, if there are any since `start`, and says where."""
    if fault is None or pipeline.num_done == start or isinstance(fault, CheckpointError):
        return
    if pipeline.interrupts.is_held:
        said = (
            f"stopped in the middle of a weight update, after {pipeline.num_done} whole steps: nothing is saved of this one. "
            "Go on from the newest checkpoint with resume_from_checkpoint=true"
        )
    else:
        try:
            said = f"saved {pipeline.num_done} steps: {pipeline.do_checkpoint()}\ngo on with resume_from_checkpoint=true"
        except CheckpointError as second:
            said = f"the last steps could not be saved: {second}"
    print(said, file=sys.stderr, flush=True)


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
