"""The transfer of a run's weights from its trainer to its inference servers."""

from collections.abc import Awaitable, Callable

from turnwise.cluster.weight_senders import SendingRanks, spawn_senders
from turnwise.config import AgenticConfig
from turnwise.inference.server_manager import LLMServerManager
from turnwise.pipelines.model_role import ModelRole
from turnwise.protocols import Cluster
from turnwise.runtime.watchdog import Watchdog
from turnwise.transfer.policy_transfer import PolicyTransfer


def build_senders(cluster: Cluster, actor_train: ModelRole, servers: LLMServerManager) -> SendingRanks:
    """The senders of the trainer's weights. They use shared memory unless trainer and server are both in this
    process, where a single server always is."""
    is_here = actor_train.name in cluster.neighbours and len(servers.servers) == 1
    return spawn_senders(cluster, actor_train.name, is_shared=not is_here, is_sharded=actor_train.is_sharded)


def build_transfer(
    config: AgenticConfig,
    senders: SendingRanks,
    servers: LLMServerManager,
    free_for_transfer: Callable[[], Awaitable[None]] | None,
    watchdog: Watchdog,
) -> PolicyTransfer:
    return PolicyTransfer(
        servers,
        senders,
        free_for_transfer=free_for_transfer,
        on_weight_update=config.on_weight_update,
        watchdog=watchdog,
        timeout_s=config.deadlines.weights_s,
    )
