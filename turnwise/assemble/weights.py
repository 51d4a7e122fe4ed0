"""The transfer of a run's weights from its trainer to its inference servers."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from turnwise.assemble.servers import start_again
from turnwise.cluster.server_process import ServerProcess
from turnwise.cluster.weight_senders import SendingEngines, SendingGroup, SendingRanks, spawn_senders
from turnwise.config import AgenticConfig
from turnwise.config.checks.role_checks import OWN_TRANSFER
from turnwise.errors import ConfigError
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
_BEYOND_DEADLINE_S = 30.0
"""Seconds that the group's own waits last longer than the update may: the update's error says more."""


def build_senders(cluster: Cluster, actor_train: ModelRole, servers: LLMServerManager) -> SendingRanks:
    """The senders of the trainer's weights. They use shared memory unless trainer and server are both in this
    process, where a single server always is."""
    is_here = actor_train.name in cluster.neighbours and len(servers.servers) == 1
    dtype = str(parse_dtype(servers.info().model.dtype)).removeprefix("torch.")
    return spawn_senders(
        cluster,
        actor_train.name,
        is_shared=not is_here,
        is_sharded=actor_train.is_sharded,
        dtype=dtype,
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
    timeout_s = config.deadlines.weights_s
    home = placement.machine.node_of(placement.of("actor_train").ranks[0][0])
    nodes = _nodes_beyond(home, servers)
    sender: SendsWeights = senders
    form = _form(senders, servers, home, nodes)
    num_copies = len(nodes) + 1 if senders.is_shared else 0
    replicas: Any = servers
    host = home.address or _LOOPBACK
    interface = (config.cluster.interface or "") if placement.cluster == "ray" else ""
    if OWN_TRANSFER in config.actor_infer.strategy_args.strategy_config:
        num_processes = _require_sent_apart(config, placement)
        sender = SendingEngines(
            senders,
            replicas,
            host,
            num_processes,
            timeout_s + _BEYOND_DEADLINE_S,
            interface,
        )
        form = f"over gloo into vLLM's own processes, in {servers.info().model.dtype}"
        num_copies = placement.num_servers * num_processes
    elif nodes:
        timeout = timeout_s + _BEYOND_DEADLINE_S
        sender = SendingGroup(senders, replicas, home.name, host, timeout, interface)
    trained = set(placement.of("actor_train").devices)
    shares_devices = not trained.isdisjoint(placement.of("actor_infer").devices)
    transfer = PolicyTransfer(
        servers,
        sender,
        free_for_transfer=free_for_transfer,
        on_weight_update=config.on_weight_update,
        watchdog=watchdog,
        timeout_s=timeout_s,
        # A group of engines is formed by `publish`: one that ends before it receives would be awaited.
        suspends_first=shares_devices or isinstance(sender, SendingEngines),
        form=form,
        num_copies=num_copies,
    )
    if all(isinstance(server, ServerProcess) for server in servers.servers):
        start = partial(start_again, deadline_s=config.deadlines.start_s)
        servers.restarts = Restarts(start, transfer.join)
    return transfer


def _require_sent_apart(config: AgenticConfig, placement: Placement) -> int:
    """The number of processes of an engine that receives weights in them. Raises ConfigError if the trainer,
    which sends meanwhile, is in the process that has to wait for the engines."""
    if placement.trains_apart:
        return config.actor_infer.model_parallel_size
    raise ConfigError(
        f"actor_infer.strategy_args.strategy_config.{OWN_TRANSFER} needs a trainer in a process of its own; "
        "set cluster.name: process or ray, or remove it"
    )


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
