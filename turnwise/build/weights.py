"""The transfer of a run's weights from its trainer to its inference servers."""

from turnwise.build.placement import FreeForTransfer
from turnwise.build.rollouts import ServedPolicy
from turnwise.cluster.weight_senders import SendingRanks, spawn_senders
from turnwise.config import AgenticConfig
from turnwise.pipelines.roles import ModelRole
from turnwise.protocols import Cluster
from turnwise.transfer.policy_transfer import PolicyTransfer


def build_senders(policy: ServedPolicy, cluster: Cluster, actor_train: ModelRole) -> SendingRanks:
    """The senders of the trainer's weights. They use shared memory unless trainer and server are both in this process, where a
    single server always is."""
    is_here = actor_train.name in cluster.neighbours and len(policy.servers.servers) == 1
    return spawn_senders(cluster, actor_train.name, is_shared=not is_here, is_sharded=actor_train.is_sharded)


def build_transfer(
    config: AgenticConfig, policy: ServedPolicy, senders: SendingRanks, freeing: FreeForTransfer
) -> PolicyTransfer:
    return PolicyTransfer(
        policy.servers,
        senders,
        free_for_transfer=freeing,
        on_weight_update=config.on_weight_update,
        watchdog=policy.event_loop.watchdog,
        timeout_s=config.deadlines.weights_s,
    )
