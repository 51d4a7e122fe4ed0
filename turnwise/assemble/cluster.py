"""Builds the cluster of a run, and the log from which an asynchronous run can be repeated."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from turnwise.assemble.placement import cpu_threads, ray_settings, set_torch_threads
from turnwise.assemble.run import seed_process
from turnwise.cluster.launched import LaunchedCluster
from turnwise.cluster.local import LocalCluster
from turnwise.cluster.messages import unsendable_part
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.errors import ConfigError, DataError, WorkerError
from turnwise.models.cpu.build import load_kernels
from turnwise.pipelines.run_folder import RunFolder
from turnwise.protocols import Algorithm, Cluster
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.placement import Placement
from turnwise.runtime.replay_log import ReplayLog

logger = logging.getLogger(__name__)


def build_cluster(
    config: AgenticConfig | SFTConfig, placement: Placement, event_loop: WatchedRunner
) -> Cluster:
    """The cluster that the placement asks for: this process alone, new processes, those that a launcher has
    started, or actors of Ray."""
    watchdog, stopwatch = event_loop.watchdog, event_loop.stopwatch
    deadline_s = config.deadlines.train_s if isinstance(config, AgenticConfig) else None
    if placement.cluster == "local":
        return LocalCluster(stopwatch, watchdog, deadline_s, placement)
    num_threads = cpu_threads(config, torch.get_num_threads())
    logger.info(
        "of %d threads, %d train and %d run rollouts",
        num_threads.both,
        num_threads.train,
        num_threads.rollout,
    )
    set_up = partial(seed_process, config)
    if placement.cluster == "ray":
        from turnwise.cluster.ray_cluster import RayCluster

        return RayCluster(
            event_loop.run,
            watchdog,
            stopwatch,
            num_threads,
            set_torch_threads,
            set_up,
            deadline_s,
            placement,
            ray_settings=ray_settings(config),
        )
    kind = LaunchedCluster if placement.cluster == "launched" else ProcessCluster
    return kind(
        event_loop.run, watchdog, stopwatch, num_threads, set_torch_threads, set_up, deadline_s, placement
    )


def check_losses(config: AgenticConfig, algorithm: Algorithm, cluster: Cluster) -> None:
    """Raises ConfigError if another process trains, and a loss of the algorithm can't be sent to it."""
    if not isinstance(cluster, ProcessCluster):
        return
    for loss in (algorithm.loss, algorithm.value_loss):
        try:
            cluster.check_sendable(loss)
        except (
            Exception
        ) as error:  # boundary: a user's object may raise anything when it is pickled, or when it arrives
            if isinstance(error, WorkerError):
                why = f"{unsendable_part(loss, 'loss')} can't be pickled. Make it where it is used"
            else:
                why = (
                    f"that can't import it ({type(error).__name__}). Make its modules importable in every "
                    f"process"
                )
            raise ConfigError(
                f"adv_estimator {config.adv_estimator}: its loss (pg_variant {config.pg_variant}) can't be "
                f"sent to the "
                f"trainer's process, which an asynchronous run and several devices need: {why}, or train in "
                f"this process "
                f"(async_generation_ratio: 0, one device). ({error})"
            ) from error


def build_replay_log(
    config: AgenticConfig, placement: Placement, folder: RunFolder, is_asynchronous: bool, replay: Path | None
) -> ReplayLog | None:
    """The log that records an asynchronous run's time-dependent decisions; None if the run is synchronous.
    With `replay`, the log also repeats those of the run in that folder. Raises DataError if `replay` is set
    and such a run can't be repeated."""
    for problem in _no_replay(config, placement, is_asynchronous) if replay else ():
        raise DataError(f"--replay {replay}: {problem}")
    if not is_asynchronous:
        return None
    replay_log = ReplayLog(folder.replay_log, recorded=replay / folder.replay_log.name if replay else None)
    if folder.resumed_from is not None:
        replay_log.resumed()
    return replay_log


def begin_replay_log(replay_log: ReplayLog, config: AgenticConfig, placement: Placement, engine: str) -> None:
    """Records torch's version, device, processor, threads, kernels and engine. Raises DataError if the
    recorded ones differ."""
    threads = cpu_threads(config, torch.get_num_threads())
    replay_log.begin(
        {
            "torch": torch.__version__,
            "device": torch.device(placement.device_of("actor_infer")).type,
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": f"{threads.train} to train and {threads.rollout} to play",
            "kernels": "torch's" if load_kernels() is None else "the library's",
            "engine": engine,
        }
    )


def _no_replay(config: AgenticConfig, placement: Placement, is_asynchronous: bool) -> Iterator[str]:
    """Yields the reasons why a run of this config can't be repeated. In the texts, "it" is the recorded
    run."""
    if not is_asynchronous:
        yield "it trained synchronously, so its config alone repeats it; train without --replay"
    if config.train_env_manager.group_size_redundancy or config.stale_groups == "drop":
        yield (
            "its group_size_redundancy or stale_groups: drop cancelled episodes by time, which a replay "
            "can't repeat"
        )
    if placement.num_servers > 1:
        yield (
            f"its {placement.num_servers} inference replicas sampled in their own processes, which follow "
            f"no schedule"
        )
    sampler = config.actor_infer.strategy_args.strategy_name
    if sampler != "embedded":
        yield f"it sampled with {sampler}, and only the embedded server follows a schedule"
