"""Joins Ray for a run, and builds the cluster over it. The only file that loads the module which imports ray,
and only for runs that use it."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from tempfile import NamedTemporaryFile
from typing import Any

from turnwise.cluster.growing import bundles_of, described, wait_for_nodes
from turnwise.cluster.hosts import ForkedHosts, Hosts
from turnwise.cluster.ray_settings import RaySettings
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.checks.contradictions import named_models
from turnwise.config.demand import Demand
from turnwise.config.place import smallest_machine
from turnwise.errors import MissingDeviceError
from turnwise.model_files.hub import local_path
from turnwise.protocols import Cluster
from turnwise.runtime.machine import Machine, Node, ray_sign
from turnwise.runtime.placement import Placement
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog


def joined_nodes(config: AgenticConfig | SFTConfig) -> tuple[Node, ...]:
    """The nodes of the Ray that a run of this config uses, which this process joins, or starts on this
    machine. Raises NotAvailableError if it can't be joined."""
    from turnwise.cluster.ray_session import join_ray

    return join_ray(_settings(config), smallest_machine(config).num_devices).nodes


def placed_on_nodes(
    config: AgenticConfig | SFTConfig, place: Callable[[tuple[Node, ...]], Placement]
) -> Placement:
    """What `place` makes of the nodes of the Ray that a run of this config uses, which this process joins, or
    starts on this machine. If they lack a device and Ray has an autoscaler, waits for the nodes that it adds.
    Raises NotAvailableError if Ray can't be joined, DeadlineError if those nodes don't come, and what `place`
    raises."""

    def placed() -> Placement:
        return place(joined_nodes(config))

    settings = _settings(config)
    try:
        return placed()
    except MissingDeviceError:
        from turnwise.cluster.ray_growth import asking_for, free_amounts, may_grow

        if not settings.address or not may_grow():
            raise
    from turnwise.cluster.ray_session import join_ray

    bundles = _bundles(config, join_ray(settings))
    with asking_for(bundles):
        return wait_for_nodes(placed, described(bundles), free_amounts, settings.start_s)


def _bundles(config: AgenticConfig | SFTConfig, machine: Machine) -> list[dict[str, float]]:
    """What the config's devices are for Ray. A head that only drives says nothing of their kind: others have
    accelerators then."""
    last = max(Demand.of(config).named_devices, default=0)
    kind = "CPU" if machine.num_devices and not machine.accelerator else "GPU"
    return bundles_of(last + 1, config.num_gpus_per_node, kind)


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
    with ExitStack() as mark:
        paths = _model_files(config)
        if placement.roles:
            # Ranks write checkpoints there. A file made now shows whether all nodes see the same folder.
            os.makedirs(config.output_dir, exist_ok=True)
            file = mark.enter_context(NamedTemporaryFile(prefix=".turnwise-", dir=config.output_dir))
            paths["output_dir"] = os.path.abspath(file.name)
        settings = replace(_settings(config), paths=paths)
        return RayHosts(placement, settings, watchdog, stopwatch)


def _model_files(config: AgenticConfig | SFTConfig) -> dict[str, str]:
    """Key of each model that is given as a folder → the path of its config.json, or of its adapter's."""
    paths: dict[str, str] = {}
    for key, model in named_models(config):
        folder = local_path(model.model_name_or_path).absolute()
        for name in ("config.json", "adapter_config.json"):
            if (folder / name).is_file():
                paths[key] = str(folder / name)
    return paths


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
    return replace(
        settings,
        start_s=deadlines.start_s,
        node_s=deadlines.node_s,
        stopped_s=deadlines.train_s,
    )
