"""The transfer of a run's weights from its trainer to its inference servers."""

import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from turnwise.assemble.servers import start_again
from turnwise.cluster.engine_senders import CopyingRanks, SendingEngines
from turnwise.cluster.server_process import ServerProcess
from turnwise.cluster.weight_senders import SendingGroup, SendingRanks, spawn_senders
from turnwise.config import AgenticConfig
from turnwise.config.own_transfer import Backend, own_transfer
from turnwise.inference.restarts import Restarts
from turnwise.inference.server_manager import LLMServerManager
from turnwise.models.load import parse_dtype
from turnwise.pipelines.model_role import ModelRole
from turnwise.protocols import Cluster, SendsWeights
from turnwise.runtime.machine import Node
from turnwise.runtime.placement import Placement
from turnwise.runtime.watchdog import Watchdog
from turnwise.transfer.policy_transfer import PolicyTransfer

_LOOPBACK = "127.0.0.1"
_WAYS: dict[Backend, str] = {
    "gloo": "over gloo",
    "nccl": "over NCCL, from GPU to GPU,",
    "ipc": "on the device that they share",
}
"""How the weights get into an engine, by its own transfer."""
_BEYOND_DEADLINE_S = 30.0
"""Seconds that the group's own waits last longer than the update may: the update's error says more."""


def build_senders(cluster: Cluster, actor_train: ModelRole, servers: LLMServerManager) -> SendingRanks:
    """The senders of the trainer's weights. They use shared memory unless trainer and server are both in this
    process, where a single server always is."""
    is_here = actor_train.name in cluster.neighbours and len(servers.servers) == 1
    dtype = str(parse_dtype(servers.info().model.dtype)).removeprefix("torch.")
    layout = cluster.placement.of(actor_train.name).layout
    return spawn_senders(
        cluster,
        actor_train.name,
        is_shared=not is_here,
        is_sharded=actor_train.is_sharded,
        dtype=dtype,
        speaker=layout.speaker,
    )


def build_transfer(
    config: AgenticConfig,
    placement: Placement,
    senders: SendingRanks,
    servers: LLMServerManager,
    free_for_transfer: Callable[[], Awaitable[None]] | None,
    watchdog: Watchdog,
) -> PolicyTransfer:
    """The transfer of a run, in the form that its placement asks for. Replicas in processes of their own are
    started again when they die."""
    route = _route(config, placement, senders, servers)
    trained = set(placement.of("actor_train").devices)
    shares_devices = not trained.isdisjoint(placement.of("actor_infer").devices)
    transfer = PolicyTransfer(
        servers,
        route.sender,
        free_for_transfer=free_for_transfer,
        on_weight_update=config.on_weight_update,
        watchdog=watchdog,
        timeout_s=config.deadlines.weights_s,
        # A group of engines is formed by `publish`: one that ends before it receives would be awaited.
        suspends_first=shares_devices or isinstance(route.sender, SendingEngines),
        form=route.form,
        num_copies=route.num_copies,
    )
    if all(isinstance(server, ServerProcess) for server in servers.servers):
        start = partial(start_again, deadline_s=config.deadlines.start_s)
        servers.restarts = Restarts(start, transfer.join)
    return transfer


@dataclass(frozen=True)
class _Route:
    """How the weights get to the servers, in a few words (`form`) and a number of copies."""

    sender: SendsWeights
    form: str
    num_copies: int


def _route(
    config: AgenticConfig,
    placement: Placement,
    senders: SendingRanks,
    servers: LLMServerManager,
) -> _Route:
    """The form that the placement asks for, or the engine's own transfer if the config names one."""
    home = placement.machine.node_of(placement.of("actor_train").ranks[senders.speaker][0])
    nodes = _nodes_beyond(home, servers)
    timeout_s = config.deadlines.weights_s + _BEYOND_DEADLINE_S
    interface = (config.cluster.interface or "") if placement.cluster == "ray" else ""
    host = home.address or _LOOPBACK
    replicas: Any = servers
    backend = own_transfer(config.actor_infer)
    if backend is not None:
        num_processes = config.actor_infer.model_parallel_size
        form = f"{_WAYS[backend]} into the engines' own processes, in {servers.info().model.dtype}"
        num_copies = placement.num_servers * num_processes
        if backend == "ipc":
            return _Route(_copying_ranks(senders, placement), form, num_copies)
        url = config.actor_infer.strategy_args.strategy_config.get("url")
        if url and not home.address:
            host = _own_address(url)
        device_type = "cuda" if backend == "nccl" else "cpu"
        sender = SendingEngines(
            senders,
            replicas,
            host,
            num_processes,
            timeout_s,
            interface,
            device_type,
        )
        return _Route(sender, form, num_copies)
    form = _form(senders, servers, home, nodes)
    num_copies = len(nodes) + 1 if senders.is_shared else 0
    if nodes:
        group = SendingGroup(senders, replicas, home.name, host, timeout_s, interface)
        return _Route(group, form, num_copies)
    return _Route(senders, form, num_copies)


def _copying_ranks(senders: SendingRanks, placement: Placement) -> CopyingRanks:
    """The ranks of the trainer, of which those on devices of servers hold copies for them."""
    served = set(placement.of("actor_infer").devices)
    trained = placement.of("actor_train")
    nodes: dict[int, str] = {}
    for rank, [device] in enumerate(trained.ranks):
        if device in served:
            nodes[rank] = placement.machine.node_of(device).name
    return CopyingRanks(senders, nodes)


def _own_address(url: str) -> str:
    """The address of this machine by which the host of a server reaches it."""
    host = urlsplit(url).hostname or _LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only chooses a route
        return str(probe.getsockname()[0])


def _nodes_beyond(home: Node, servers: LLMServerManager) -> list[str]:
    """The nodes of servers beside that of the trainer's first rank."""
    nodes: list[str] = []
    for server in servers.servers:
        if isinstance(server, ServerProcess) and server.node not in (home.name, *nodes):
            nodes.append(server.node)
    return nodes


def _form(
    senders: SendingRanks,
    servers: LLMServerManager,
    home: Node,
    nodes: Sequence[str],
) -> str:
    """How the weights reach the servers, in a few words; empty if they read the trainer's own."""
    info = servers.info()
    if not info.needs_weights:
        return ""
    if not senders.is_shared:
        return "copied from the trainer's tensors"
    if not nodes:
        return f"through shared memory, one copy in {info.model.dtype} for all replicas"
    return (
        f"from {home.name} over gloo to {', '.join(nodes)}, then through shared memory: one copy in "
        f"{info.model.dtype} a node"
    )
