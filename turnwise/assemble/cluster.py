"""Builds the cluster of a run, and the log from which an asynchronous run can be repeated."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from turnwise.assemble.placement import cpu_threads, set_torch_threads
from turnwise.assemble.ray import make_ray_cluster
from turnwise.assemble.run import seed_process
from turnwise.cluster.hosts import Hosts
from turnwise.cluster.launched import LaunchedCluster
from turnwise.cluster.local import LocalCluster
from turnwise.cluster.messages import unsendable_part
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.errors import ConfigError, DataError, WorkerError, counted
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.models.cpu.build import load_kernels
from turnwise.protocols import Algorithm, Cluster
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.placement import Placement
from turnwise.runtime.schedule_log import ScheduleLog

logger = logging.getLogger(__name__)


def build_cluster(
    config: AgenticConfig | SFTConfig,
    placement: Placement,
    event_loop: WatchedRunner,
    hosts: Hosts,
) -> Cluster:
    """The cluster that the placement asks for: this process alone, new processes, those that a launcher has
    started, or actors of Ray. It closes `hosts` at its end."""
    watchdog = event_loop.watchdog
    stopwatch = event_loop.stopwatch
    deadline_s = None
    if isinstance(config, AgenticConfig):
        deadline_s = config.deadlines.train_s
    if placement.cluster == "local":
        return LocalCluster(stopwatch, watchdog, deadline_s, placement)
    num_threads = cpu_threads(config, torch.get_num_threads())
    logger.info(
        "of %d threads, %d train and %d run rollouts",
        num_threads.total,
        num_threads.train,
        num_threads.rollout,
    )
    set_up = partial(seed_process, config)
    arguments = (
        event_loop.run,
        watchdog,
        stopwatch,
        num_threads,
        set_torch_threads,
        set_up,
        deadline_s,
        placement,
    )
    if placement.cluster == "ray":
        return make_ray_cluster(*arguments, hosts=hosts, on_end=hosts.close)
    kind = LaunchedCluster if placement.cluster == "launched" else ProcessCluster
    return kind(*arguments)


def check_losses(config: AgenticConfig, algorithm: Algorithm, cluster: Cluster) -> None:
    """Raises ConfigError if another process trains, and a loss of the algorithm can't be sent to it."""
    if not isinstance(cluster, ProcessCluster):
        return
    for loss in (algorithm.loss, algorithm.value_loss):
        for process, trial in cluster.try_sending(loss).items():
            try:
                trial.result()
            except (
                Exception
            ) as error:  # boundary: a user's object may raise anything when it is pickled or unpickled
                raise _unsendable(config, loss, process, error) from error


def _unsendable(config: AgenticConfig, loss: Any, process: str, error: Exception) -> ConfigError:
    why = f"that can't import it ({type(error).__name__}). Make its modules importable in every process"
    if isinstance(error, WorkerError):
        why = f"{unsendable_part(loss, 'loss')} can't be pickled. Make it where it is used"
    return ConfigError(
        f"adv_estimator {config.adv_estimator}: its loss (pg_variant {config.pg_variant}) can't be sent to "
        f"{process}, which an asynchronous run and several devices need: {why}, on every node, or train in "
        f"this process (async_generation_ratio: 0, one device). ({error})"
    )


def build_schedule_log(
    config: AgenticConfig,
    placement: Placement,
    folder: RunFolder,
    is_asynchronous: bool,
    repeated_run: Path | None,
) -> ScheduleLog | None:
    """The log that records an asynchronous run's time-dependent decisions; None if the run is synchronous.
    With `repeated_run`, the log also repeats those of the run in that folder. Raises DataError if
    `repeated_run` is set and such a run can't be repeated."""
    recorded = None
    if repeated_run:
        for problem in _obstacles_to_repeat(config, placement, is_asynchronous):
            raise DataError(f"--replay {repeated_run}: {problem}")
        recorded = repeated_run / folder.schedule_log.name
    if not is_asynchronous:
        return None
    schedule_log = ScheduleLog(folder.schedule_log, recorded)
    if folder.resumed_from is not None:
        schedule_log.resumed()
    return schedule_log


def begin_schedule_log(
    schedule_log: ScheduleLog,
    config: AgenticConfig,
    placement: Placement,
    engine: str,
) -> None:
    """Records torch's version, device, processor, threads, kernels and engine. Raises DataError if the
    recorded ones differ."""
    threads = cpu_threads(config, torch.get_num_threads())
    kernels = "the library's"
    if load_kernels() is None:
        kernels = "torch's"
    schedule_log.begin(
        {
            "torch": torch.__version__,
            "device": torch.device(placement.device_of("actor_infer")).type,
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": f"{threads.train} to train and {threads.rollout} to play",
            "kernels": kernels,
            "engine": engine,
        }
    )


def _obstacles_to_repeat(config: AgenticConfig, placement: Placement, is_asynchronous: bool) -> Iterator[str]:
    """Yields the reasons why a run of this config can't be repeated. In the texts, "it" is the recorded
    run."""
    if not is_asynchronous:
        yield "it trained synchronously, so its config alone repeats it; train without --replay"
    if config.names_gateway:
        yield "its agents sent their requests over HTTP when they liked, which a replay can't repeat"
    if config.train_env_manager.group_size_redundancy or config.stale_groups == "drop":
        yield (
            "its group_size_redundancy or stale_groups: drop cancelled episodes by time, which a replay "
            "can't repeat"
        )
    if placement.serves_apart:
        replicas = counted(placement.num_servers, "inference replica")
        nodes = {placement.machine.node_of(device).name for device in placement.all_devices}
        places = f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
        yield f"it sampled with {replicas} in processes of their own{places}, which follow no schedule"
    sampler = config.actor_infer.strategy_args.strategy_name
    if sampler != "embedded":
        yield f"it sampled with {sampler}, and only the embedded server follows a schedule"
