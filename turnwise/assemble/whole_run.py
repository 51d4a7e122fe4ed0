"""A run of any kind, from creating its folder to drawing its learning curve."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from turnwise.assemble.placement import place_here
from turnwise.assemble.run import start_run
from turnwise.assemble.run_table import settings_table
from turnwise.cluster.launched import serve_launched
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.lifecycle.session import session
from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.pipelines.sft import SFTPipeline
from turnwise.report.curve import learning_curve
from turnwise.runtime.placement import Placement
from turnwise.runtime.rank import launched
from turnwise.tracking.jsonl import read_metrics

P = TypeVar("P", AgenticPipeline, SFTPipeline)


@contextmanager
def whole_run(
    config: AgenticConfig | SFTConfig,
    build: Callable[[RunFolder, Placement], P],
    is_quiet: bool = False,
    plays: bool = True,
) -> Iterator[P]:
    """Yields the pipeline that `build` makes, in a `session`. Prints where the model and curve are and,
    unless `is_quiet`, the run's folder and settings. In a launcher's other processes, serves the calls of
    rank 0, and exits when the run ends."""
    rank, _ = launched()
    if rank > 0:
        serve_launched()
        sys.exit()
    placement = place_here(config, plays)
    _note_devices(config, placement)
    folder = start_run(config)

    def built() -> P:
        pipeline = build(folder, placement)
        if not is_quiet:
            print(f"run folder: {folder.path}", flush=True)
            settings_table(pipeline).show()
        return pipeline

    with session(folder, built) as pipeline:
        yield pipeline
    if model := pipeline.checkpoints.newest:
        print(f"model: {model}")
    learning_curve(read_metrics(folder.metrics), folder.curve, config.exp_name)
    print(f"learning curve: {folder.curve}")


def _note_devices(config: AgenticConfig | SFTConfig, placement: Placement) -> None:
    """Writes the devices that a launcher gives the trainer into the config, which counts the samples of an
    optimiser step."""
    if placement.cluster != "launched":
        return
    if isinstance(config, SFTConfig):
        config.fill(device_mapping=[*placement.of("sft").devices])
    else:
        config.actor_train.fill(device_mapping=[*placement.of("actor_train").devices])
