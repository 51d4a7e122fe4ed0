"""The senders of weights on all ranks of a role, as one."""

from dataclasses import dataclass
from functools import partial

from turnwise.protocols import Cluster, Pending, Route, Workers
from turnwise.transfer.sender import make_sender

SENDER = "weight_sender"
"""The role of the workers that send weights."""


@dataclass(frozen=True)
class SendingRanks:
    """A `protocols.SendsWeights`. It calls the senders of all ranks if the model is sharded, else that of the
    first rank."""

    workers: Workers
    is_sharded: bool = False

    def manifest(self) -> Pending:
        return self.workers.call("manifest", route=self._route)

    def publish(self) -> Pending:
        return self.workers.call("publish", route=self._route)

    @property
    def _route(self) -> Route:
        return "broadcast" if self.is_sharded else "rank0"


def spawn_senders(cluster: Cluster, role: str, *, is_shared: bool, is_sharded: bool) -> SendingRanks:
    """Makes a sender on each rank of a role, which has been spawned before. `is_shared`: servers in other
    processes read the weights. `is_sharded`: each rank holds only a share of them."""
    workers = cluster.spawn(SENDER, partial(make_sender, role, is_shared), beside=role)
    return SendingRanks(workers, is_sharded)
