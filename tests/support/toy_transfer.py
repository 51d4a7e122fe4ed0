"""Weight updates from a function that yields tensors to servers in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from turnwise.cluster.local import LocalCluster
from turnwise.cluster.weight_senders import SendingRanks
from turnwise.inference.server_manager import LLMServerManager
from turnwise.protocols import InferenceServer
from turnwise.runtime.watchdog import Watchdog
from turnwise.transfer.policy_transfer import PolicyTransfer
from turnwise.transfer.sender import WeightSender


def transfer_of(
    servers: Sequence[InferenceServer],
    read: Callable[[], Iterable[tuple[str, Tensor]]],
    *,
    is_shared: bool = False,
    watchdog: Watchdog | None = None,
    **options: Any,
) -> PolicyTransfer:
    """The transfer of what `read` iterates over, as a run's is built."""
    watchdog = watchdog or Watchdog()
    workers = LocalCluster(watchdog=watchdog).spawn("weight_sender", lambda _: WeightSender(read, is_shared))
    manager = LLMServerManager(servers, watchdog=watchdog)
    return PolicyTransfer(manager, SendingRanks(workers), watchdog=watchdog, **options)
