"""Runs a pipeline. If something ends it early, its finished steps are saved first."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from turnwise.errors import CheckpointError, DeadlineError, TurnwiseError, WorkerError, counted
from turnwise.lifecycle.checkpoints import Checkpoints
from turnwise.lifecycle.interrupt import Interrupts, ends_by_signals, how_to_continue
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.protocols import Cluster

logger = logging.getLogger(__name__)


class Pipeline(Protocol):
    """What a session needs of the training loop that it runs."""

    checkpoints: Checkpoints
    interrupts: Interrupts
    cluster: Cluster

    def run(self) -> None: ...

    def do_checkpoint(self) -> Path: ...

    def close(self) -> None: ...


P = TypeVar("P", bound=Pipeline)


@contextmanager
def session(folder: RunFolder, build: Callable[[], P]) -> Iterator[P]:
    """Builds a pipeline, runs the body with it, and closes it. If the body ends early, by Ctrl-C, SIGTERM, an
    error, or because a generator around it is closed, the finished steps are saved. If `build` fails, a new
    folder is removed."""
    with ends_by_signals():
        with ExitStack() as start_that_failed:
            start_that_failed.callback(folder.discard)
            pipeline = build()
            start_that_failed.pop_all()
        with ExitStack() as on_the_way_out:
            # Printed after the pipeline is closed, which removes the live view from the terminal.
            messages: list[str] = []
            on_the_way_out.callback(lambda: sys.stderr.writelines(f"{line}\n" for line in messages))
            on_the_way_out.push(partial(_close, pipeline))
            num_done = pipeline.checkpoints.num_done
            on_the_way_out.push(partial(_save_unfinished, pipeline, num_done, messages.append))
            yield pipeline


def run_to_end(folder: RunFolder, build: Callable[[], P]) -> P:
    """Builds and runs a pipeline in a `session`, and returns it."""
    with session(folder, build) as pipeline:
        pipeline.run()
    return pipeline


def _save_unfinished(
    pipeline: Pipeline,
    start: int,
    say: Callable[[str], None],
    kind: object,
    fault: BaseException | None,
    trace: object,
) -> None:
    """If something ended the run early: saves the steps finished since `start`, if any, and tells `say`
    where."""
    checkpoints = pipeline.checkpoints
    if fault is not None:
        logger.info("the run ends early by %s: %s", type(fault).__name__, fault)
    if fault is None or checkpoints.num_done == start or isinstance(fault, CheckpointError):
        return
    pipeline.interrupts.hold("saving")
    try:
        if checkpoints.is_torn and not _keeps_whole_weights(pipeline):
            say(f"stopped in the middle of a weight update; {checkpoints.lost_text()}")
            return
        steps = counted(checkpoints.num_done, "step")
        say(f"saved {steps}: {pipeline.do_checkpoint()}\ncontinue with {how_to_continue()}")
    except (CheckpointError, DeadlineError, WorkerError) as second:
        why = ""
        if checkpoints.is_sharded and not isinstance(second, CheckpointError):
            why = " (each rank holds a share of the model, and those of ended ranks can't be saved)"
        say(f"the last steps could not be saved: {second}{why}; {checkpoints.lost_text()}")
    except KeyboardInterrupt:
        say(f"the last steps are not saved; {checkpoints.lost_text()}")
    finally:
        pipeline.interrupts.restore()


def _keeps_whole_weights(pipeline: Pipeline) -> bool:
    """Whether the last finished step can still be saved, by the first rank of each role."""
    return pipeline.cluster.keep_first_ranks() and pipeline.checkpoints.has_whole_weights()


def _close(pipeline: Pipeline, kind: object, fault: BaseException | None, trace: object) -> None:
    """Closes the pipeline. If the run has failed already, an error in closing is only logged."""
    try:
        pipeline.close()
    except (OSError, TurnwiseError) as second:
        if fault is None:
            raise
        logger.error("closing the run failed as well: %s", second)
