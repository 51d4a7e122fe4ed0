"""Joins Ray for a run, and builds the cluster over it. The only file that loads the module which imports ray,
and only for runs that use it."""

from typing import Any

from turnwise.cluster.ray_settings import RaySettings
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.place import smallest_machine
from turnwise.protocols import Cluster
from turnwise.runtime.machine import Node, ray_sign


def joined_nodes(config: AgenticConfig | SFTConfig) -> tuple[Node, ...]:
    """The nodes of the Ray that a run of this config uses, which this process joins, or starts on this
    machine. Raises NotAvailableError if it can't be joined."""
    from turnwise.cluster.ray_cluster import join_ray

    return join_ray(_settings(config), smallest_machine(config).num_devices).nodes


def make_ray_cluster(config: AgenticConfig | SFTConfig, *args: Any) -> Cluster:
    """The cluster over Ray, from the arguments of a `ProcessCluster`."""
    from turnwise.cluster.ray_cluster import RayCluster

    return RayCluster(*args, ray_settings=_settings(config))


def _settings(config: AgenticConfig | SFTConfig) -> RaySettings:
    cluster = config.cluster
    address = cluster.address or ("auto" if ray_sign() else "")
    start_s = config.deadlines.start_s if isinstance(config, AgenticConfig) else None
    return RaySettings(address, cluster.interface or "", cluster.runtime_env, start_s)
