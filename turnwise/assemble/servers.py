"""The inference servers of a config: one in this process, or several in their own processes."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from turnwise.assemble.placement import cpu_threads, set_torch_threads
from turnwise.assemble.run import seed_process
from turnwise.cluster.hosts import Hosts
from turnwise.cluster.messages import SetUp
from turnwise.cluster.process import WorkerProcess
from turnwise.cluster.server_process import SERVERS, ServerProcess
from turnwise.config import AgenticConfig
from turnwise.errors import ConfigError, NotAvailableError, ServerError, counted
from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.protocols import InferenceServer
from turnwise.runtime.entry_points import load_class
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.info import PolicyInfo, ServerInfo
from turnwise.runtime.placement import Placement
from turnwise.runtime.rank import RankContext
from turnwise.runtime.schedule_log import ScheduleLog
from turnwise.spec import STRATEGIES

logger = logging.getLogger(__name__)


def require_abilities(config: AgenticConfig, server: ServerInfo) -> None:
    """Raises NotAvailableError if the server can't treat running requests as `on_weight_update` asks, or
    can't report which tokens `top_k` left to draw from. For the latter, only warns if no setting compares
    sampler's and trainer's log-probs."""
    can_pause = "keep" in server.suspensions
    if config.on_weight_update == "keep" and not (can_pause and server.weight_versions):
        ability = "pause running responses"
        if can_pause:
            ability = "say which weights sampled which token"
        raise NotAvailableError(
            f"on_weight_update is keep, and the server ({server.engine}) can't {ability}; "
            "use finish or abort_continue"
        )
    if server.sampling_mask or not config.sampling("train").keeps_ids:
        return
    gap = (
        f"the server ({server.engine}) doesn't say which tokens top_k, top_p and min_p left, so the trainer "
        "can't compare its log-probs with the sampler's"
    )
    advice = "use strategy_name embedded or hf, or sample with top_k 0, top_p 1, min_p 0"
    if config.needs_kept_ids:
        off = "train without train_infer_correction, use_rollout_log_probs and async_generation_ratio"
        raise NotAvailableError(f"{gap}; {advice}, or {off}")
    logger.warning("%s: the policy loss ignores the truncation, which biases it a little; %s", gap, advice)


def build_servers(
    config: AgenticConfig,
    placement: Placement,
    policy: PolicyInfo,
    event_loop: WatchedRunner,
    schedule_log: ScheduleLog,
    max_concurrency: int,
    neighbours: Mapping[str, Any],
    hosts: Hosts,
) -> list[InferenceServer]:
    """Starts a server per replica, in processes that `hosts` starts. Where the placement has a server in this
    process, it may read a neighbour's model (see `serve`)."""
    strategy = config.actor_infer.strategy_args
    entry = STRATEGIES[strategy.strategy_name].entry
    server_class: Any = load_class(entry, "actor_infer.strategy_args.strategy_name", ConfigError)
    options = dict(strategy.strategy_config)
    is_embedded = issubclass(server_class, EmbeddedServer)
    if is_embedded:
        options = {"max_concurrency": max_concurrency, **options}
    if placement.serves_apart:
        factory = partial(server_class.for_policy, policy=policy, **options)
        size = placement.num_servers
        names = [f"inference replica {replica}" for replica in range(size)]
        return list(
            start_servers(
                config,
                placement,
                "actor_infer",
                names,
                factory,
                event_loop,
                hosts,
            )
        )
    if is_embedded:
        options["schedule_log"] = schedule_log
    devices = placement.devices_of("actor_infer")
    rank = RankContext(
        "actor_infer",
        device=devices[0],
        devices=devices,
        neighbours=neighbours,
        stopwatch=event_loop.stopwatch,
    )
    event_loop.watchdog.start()
    event = f"the {strategy.strategy_name} server to start"
    timeout_s = config.deadlines.start_s
    with event_loop.watchdog.waiting("the run", event, timeout_s, "deadlines.start_s"):
        return [server_class.for_policy(rank, policy, **options)]


def start_servers(
    config: AgenticConfig,
    placement: Placement,
    role: str,
    names: Sequence[str],
    factory: Callable[[RankContext], Any],
    event_loop: WatchedRunner,
    hosts: Hosts,
) -> list[ServerProcess]:
    """Starts each server of a role in a process of its own. The processes share the threads of the rollouts
    equally."""
    size = len(names)
    num_threads = max(1, cpu_threads(config, torch.get_num_threads()).rollout // size)
    logger.info(
        "%s in %s of their own, with %d threads each",
        role,
        counted(size, "process"),
        num_threads,
    )
    levels = {name: logging.getLogger(name).level for name in ("", "turnwise")}
    begin = partial(_begin, config, num_threads)
    set_up = SetUp(hosts.environment, list(sys.path), os.getcwd(), levels, begin)
    ranks = placement.of(role).ranks
    with ExitStack() as on_error:
        servers: list[ServerProcess] = []
        first_devices = [devices[0] for devices in ranks]
        processes = hosts.start(SERVERS, names, first_devices)
        for process, device in zip(processes, first_devices, strict=True):
            restart = partial(_start_process, hosts, process.name, device)
            server = ServerProcess(process, event_loop.run, event_loop.watchdog, restart)
            servers.append(server)
            on_error.callback(server.end)
        for replica, (server, devices) in enumerate(zip(servers, ranks, strict=True)):
            device_names = tuple(map(hosts.device_name, devices))
            rank = RankContext(
                role,
                replica,
                size,
                node=hosts.node_name(devices[0]),
                device=device_names[0],
                devices=device_names,
            )
            server.begin(set_up, factory, rank)
        for server in servers:
            server.wait_until_ready()
        on_error.pop_all()
    return servers


def _start_process(hosts: Hosts, name: str, device: int) -> WorkerProcess:
    [process] = hosts.start(SERVERS, [name], [device])
    return process


async def start_again(server: InferenceServer, deadline_s: float | None) -> InferenceServer:
    """Ends a replica that is dead or overdue, and starts another in its place. It may take `deadline_s`
    seconds. Raises ServerError if the replica has no process of its own."""
    if not isinstance(server, ServerProcess):
        raise ServerError("only a replica in a process of its own can be started again")
    return await server.started_again(deadline_s)


def _begin(config: AgenticConfig, num_threads: int) -> None:
    set_torch_threads(num_threads)
    seed_process(config)
