"""The common parts of all runs: run folder, trackers and checkpoints; seeds and determinism of the
process."""

import logging
import os
import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

from turnwise.config import AgenticConfig, SFTConfig, dump_yaml, not_here, require, unavailable
from turnwise.config.show.dump import leaves, resolved_values
from turnwise.config.show.sizes import smaller_steps
from turnwise.config.show.step_rows import most_sampled
from turnwise.errors import ConfigError
from turnwise.lifecycle.checkpoints import Checkpoints, Contents
from turnwise.lifecycle.resume import checkpoints_folder, open_run
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.pipelines.sft import SFTPipeline
from turnwise.protocols import Tracker
from turnwise.runtime.entry_points import load_class
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.spec import TRACKERS
from turnwise.tracking.jsonl import JsonlTracker, read_metrics
from turnwise.tracking.live import stdout_tracker
from turnwise.tracking.metric_columns import MetricColumns
from turnwise.tracking.pace import Pace
from turnwise.tracking.store import StoreTracker, TrackedRun, tracker_arguments
from turnwise.types import derive_seed

logger = logging.getLogger(__name__)


def build_trackers(
    config: AgenticConfig | SFTConfig,
    folder: RunFolder,
    columns: MetricColumns,
    num_steps: int,
    is_quiet: bool,
    stopwatch: Stopwatch,
) -> list[Tracker]:
    """Trackers for `metrics.jsonl` and for all that `track_with` names; a quiet run has none that prints
    steps."""
    trackers: list[Tracker] = [JsonlTracker(folder.metrics)]
    values = leaves(resolved_values(config))
    settings = {name: value for name, value in values if not name.startswith("tracker_kwargs")}
    run = TrackedRun(folder.path, config.exp_name, folder.path.name, folder.num_done, settings)
    with ExitStack() as on_error:
        for name in config.track_with:
            target = TRACKERS[name].target
            if target:
                tracker_class = load_class(target, "track_with", ConfigError)
                arguments = tracker_arguments(config.tracker_kwargs, name)
                tracker = StoreTracker(name, partial(tracker_class, run, **arguments))
                trackers.append(tracker)
                on_error.callback(tracker.close)
        on_error.pop_all()
    if "stdout" in config.track_with and not is_quiet:
        max_tokens = 0
        # Asynchronous rollouts also sample tokens of later batches, so their number says nothing about this
        # batch.
        if isinstance(config, AgenticConfig) and not config.plays_ahead:
            max_tokens = most_sampled(config)
        pace = Pace(num_steps, folder.num_done, stopwatch, max_tokens, smaller_steps(config))
        trackers.append(stdout_tracker(config.exp_name, columns, pace, every=config.logging_steps))
    return trackers


def build_checkpoints(
    config: AgenticConfig | SFTConfig,
    folder: RunFolder,
    num_steps: int,
    contents: Contents,
) -> Checkpoints:
    """The checkpoints of a run: where, when and what it saves."""
    path = checkpoints_folder(config, folder.path)
    return Checkpoints(
        path,
        config.save_steps,
        config.max_ckpt_to_keep,
        num_steps,
        contents,
        dump_yaml(config),
        config.checkpoint_config.save_hf_model,
    )


def begin(
    config: AgenticConfig | SFTConfig, folder: RunFolder, pipeline: AgenticPipeline | SFTPipeline
) -> None:
    """Begins the run of a built pipeline: restores the checkpoint of a resumed run, and only then changes the
    run's files."""
    with ExitStack() as on_error:
        on_error.callback(pipeline.log.close)
        if len(pipeline.cluster.placement.machine.nodes) > 1:
            pipeline.checkpoints.require_seen()
        if folder.resumed_from is not None:
            pipeline.checkpoints.restore(folder.resumed_from)
        folder.begin(pipeline.checkpoints.config_yaml)
        if pipeline.log.health is not None and folder.metrics.exists():
            pipeline.log.health.restore(read_metrics(folder.metrics))
        on_error.pop_all()


def start_run(config: AgenticConfig | SFTConfig) -> RunFolder:
    """Makes the run's folder and log, or opens those of a resumed run. Raises TurnwiseError if the run can't
    start here."""
    require([*unavailable(config), *not_here(config)])
    folder, notes = open_run(config)
    with ExitStack() as on_error:
        on_error.callback(folder.discard)
        logging_dir = None
        if config.logging_dir:
            logging_dir = Path(config.logging_dir)
        folder.open_log(logging_dir)
        for note in notes:
            logger.warning(note)
        on_error.pop_all()
    return folder


def seed_process(config: AgenticConfig | SFTConfig) -> None:
    """Seeds torch in a process of a run. If `deterministic`, also seeds Python's and numpy's generators,
    which a user's code may draw from, and makes torch refuse kernels that sum in no fixed order."""
    torch.manual_seed(derive_seed(config.seed, "torch"))
    torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:
        # Otherwise torch refuses matrix products on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        random.seed(derive_seed(config.seed, "python"))
        np.random.seed(derive_seed(config.seed, "numpy") % 2**32)


def set_profile(config: AgenticConfig | SFTConfig) -> None:
    """Seeds the process, and logs whether the run is deterministic. Even without `deterministic: true`, two
    synchronous runs on a CPU are bit-identical if both have the embedded server, no environments in workers
    or threads, and the same number of torch threads."""
    seed_process(config)
    profile = "deterministic" if config.deterministic else "not asked to be deterministic"
    logger.info("profile: %s, %d threads, seed %d", profile, torch.get_num_threads(), config.seed)
