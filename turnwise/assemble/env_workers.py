"""Builds the workers in which the environments of a config live."""

import logging
import math
from collections.abc import Collection, Mapping
from typing import TypeVar

from turnwise.agents.env_agent import EnvAgent
from turnwise.cluster.env_pool import EnvPool, PoolSettings
from turnwise.cluster.hosts import Hosts
from turnwise.config import AgenticConfig
from turnwise.envs.registry import bound_class, env_class
from turnwise.errors import counted
from turnwise.examine.agents import env_agent_class
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.machine import num_cores
from turnwise.types import Split

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_PER_CORE = 4
"""Maximum number of workers of a run per core."""


def remote_tags(config: AgenticConfig, split: Split) -> list[str]:
    """The tags whose environments live in workers: those of `max_env_num_per_worker`, but for tags with
    `use_thread_lock` and for tags that an agent plays which isn't an EnvAgent, since it calls environments by
    itself."""
    manager = config.env_manager(split)
    if not manager.max_env_num_per_worker:
        return []
    return [
        tag
        for tag in manager.env_tags
        if not config.custom_envs[tag].use_thread_lock and _is_env_agent(config, tag)
    ]


def _is_env_agent(config: AgenticConfig, tag: str) -> bool:
    make = env_agent_class(config, tag).make
    return isinstance(make, type) and issubclass(make, EnvAgent)


def num_environments(config: AgenticConfig, split: Split, tag: str) -> int:
    """The number of environments of a tag that play at the same time."""
    manager = config.env_manager(split)
    num_groups = dict(zip(manager.tags, manager.num_groups_partition, strict=True))[tag]
    return num_groups * (manager.group_size + manager.group_size_redundancy)


def num_workers(requested: Mapping[T, int], cores: int) -> dict[T, int]:
    """The number of workers of each tag, of which so many are requested. If these are more than
    `MAX_PER_CORE` for each of the cores, each tag gets its share of that many, at least one.

    >>> num_workers({"A": 2}, cores=2)
    {'A': 2}
    >>> num_workers({"A": 24, "B": 8}, cores=2)
    {'A': 6, 'B': 2}
    """
    total = sum(requested.values())
    limit = MAX_PER_CORE * cores
    if total <= limit:
        return dict(requested)
    return {tag: max(1, number * limit // total) for tag, number in requested.items()}


def shared_workers(
    config: AgenticConfig, split: Split, started: Collection[Split], cores: int
) -> dict[str, int]:
    """The number of workers of each tag of a split. The limit is one for the run: training leaves validation
    its share, and a split that is `started` has its own."""
    splits = {split, *started}
    if split == "train" and config.uses_validation:
        splits.add("val")
    requested: dict[tuple[Split, str], int] = {}
    for each in sorted(splits):
        num_each = config.env_manager(each).max_env_num_per_worker
        for tag in remote_tags(config, each):
            if number := num_environments(config, each, tag):
                requested[each, tag] = math.ceil(number / num_each)
    shares = num_workers(requested, cores)
    return {tag: number for (each, tag), number in shares.items() if each == split}


def start_env_workers(
    config: AgenticConfig,
    split: Split,
    event_loop: WatchedRunner,
    hosts: Hosts | None = None,
    started: Collection[Split] = (),
) -> dict[str, EnvPool]:
    """Starts the workers of a split, by tag, as processes that `hosts` starts. Those of the splits `started`
    run already. They end when `event_loop` or `hosts` is closed. Raises ConfigError if environments can't be
    made in them."""
    tags = remote_tags(config, split)
    if not tags:
        return {}
    num_each = config.env_manager(split).max_env_num_per_worker
    numbers = {tag: num_environments(config, split, tag) for tag in tags}
    cores = num_cores() if hosts is None else hosts.num_cores
    workers = shared_workers(config, split, started, cores)
    _say(split, numbers, workers, num_each, cores)
    event_loop.watchdog.start()
    pools = {}
    for tag in workers:
        env = config.custom_envs[tag]
        settings = PoolSettings(
            tag=tag,
            class_name=env_class(env.env_type).__name__,
            is_blocking=config.deterministic,
            start_s=config.deadlines.start_s,
            stuck_s=config.deadlines.env_s,
            watchdog=event_loop.watchdog,
            stopwatch=event_loop.stopwatch,
        )
        make_env = bound_class(env.env_type, env.env_config, split)
        pools[tag] = EnvPool(make_env, workers[tag], settings, event_loop.loop, hosts)
        event_loop.at_close(pools[tag].end)
        if hosts is not None:
            hosts.before_close(pools[tag].end)
        pools[tag].begin()
    return pools


def _say(
    split: Split,
    numbers: Mapping[str, int],
    workers: Mapping[str, int],
    num_each: int,
    cores: int,
) -> None:
    for tag, number in workers.items():
        logger.info(
            "%s of %s (%s) live in %s",
            counted(numbers[tag], "environment"),
            tag,
            split,
            counted(number, "worker process"),
        )
    total = sum(math.ceil(number / num_each) for number in numbers.values())
    if total > sum(workers.values()):
        logger.warning(
            "%s_env_manager.max_env_num_per_worker: %d would be %d workers, and a run has at most %d "
            "for each of %s; %d are started, with up to %d environments each",
            split,
            num_each,
            total,
            MAX_PER_CORE,
            counted(cores, "core"),
            sum(workers.values()),
            max(math.ceil(numbers[tag] / number) for tag, number in workers.items()),
        )
