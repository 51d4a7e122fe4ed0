"""Joins Ray for a run, and builds the cluster over it. The only file that loads the module which imports ray,
and only for runs that use it."""

from dataclasses import replace
from typing import Any

from turnwise.cluster.hosts import ForkedHosts, Hosts
from turnwise.cluster.ray_settings import RaySettings
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.place import smallest_machine
from turnwise.protocols import Cluster
from turnwise.runtime.machine import Node, ray_sign
from turnwise.runtime.placement import Placement
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog


def joined_nodes(config: AgenticConfig | SFTConfig) -> tuple[Node, ...]:
    """The nodes of the Ray that a run of this config uses, which this process joins, or starts on this
    machine. Raises NotAvailableError if it can't be joined."""
    from turnwise.cluster.ray_session import join_ray

    return join_ray(_settings(config), smallest_machine(config).num_devices).nodes


def open_hosts(
    config: AgenticConfig | SFTConfig,
    placement: Placement,
    watchdog: Watchdog,
    stopwatch: Stopwatch,
) -> Hosts:
    """Who starts the processes of a run: Ray, if the placement is on its nodes, else the fork server."""
    if placement.cluster != "ray":
        return ForkedHosts(placement, stopwatch)
    from turnwise.cluster.ray_hosts import RayHosts

    watchdog.start()
    return RayHosts(placement, _settings(config), watchdog, stopwatch)


def make_ray_cluster(*args: Any, **options: Any) -> Cluster:
    """The cluster over Ray, from the arguments of a `RayCluster`."""
    from turnwise.cluster.ray_cluster import RayCluster

    return RayCluster(*args, **options)


def _settings(config: AgenticConfig | SFTConfig) -> RaySettings:
    cluster = config.cluster
    settings = RaySettings(
        cluster.address or ("auto" if ray_sign() else ""),
        cluster.interface or "",
        cluster.runtime_env,
    )
    if isinstance(config, SFTConfig):
        return settings
    deadlines = config.deadlines
    return replace(settings, start_s=deadlines.start_s, node_s=deadlines.node_s, stopped_s=deadlines.train_s)
