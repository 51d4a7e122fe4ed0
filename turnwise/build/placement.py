"""Places the roles of a config on this machine's devices, and lets roles that share an accelerator use its memory one
after the other. `turnwise config` uses this module, so torch is imported only where it is needed."""

import os
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from turnwise.cluster.placement import CpuThreads, Placement, place, require_devices
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.errors import ConfigError
from turnwise.pipelines.roles import ModelRole
from turnwise.pipelines.shared_devices import Resident, SharedDevices
from turnwise.protocols import MemoryKind
from turnwise.runtime.rank import launched
from turnwise.spec import STRATEGIES

if TYPE_CHECKING:
    import torch

    from turnwise.build.rollouts import ServedPolicy


FreeForTransfer = Callable[[], Awaitable[None]] | None
"""Frees device memory for a weight transfer; None if the roles don't share devices."""

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # one of these exists if Linux has a driver for accelerators


def build_placement(config: AgenticConfig | SFTConfig, is_apart: bool = False) -> Placement:
    """The placement of the training roles. With `is_apart`, training gets processes of its own, apart from the rollouts. Raises
    ConfigError if the machine lacks a device of the roles or servers, or `cluster.name` or the launcher can't run them."""
    num_devices = _num_accelerators()
    accelerator = "cuda" if num_devices else ""
    if not num_devices:
        num_cores = len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count() or 1
        num_devices = config.num_gpus_per_node or num_cores
    placement = place(
        config.device_mappings,
        num_devices=num_devices,
        accelerator=accelerator,
        is_apart=is_apart,
        num_launched=launched()[1],
        cluster=config.cluster.name,
    )
    if own := config.server_devices:
        require_devices("actor_infer", own, num_devices, accelerator)
    if placement.cluster == "launched" and config.num_replicas > 1:
        raise ConfigError(
            f"actor_infer.device_mapping names {len(own or ())} devices, and a launcher started this run: servers in their own "
            "processes need a run without one; name one device, or start the run without a launcher"
        )
    return placement


def sampling_device(config: AgenticConfig) -> "torch.device":
    """The device of a server in this process: the first of `actor_infer.device_mapping` if it is set and other processes train,
    else the first training device. Raises ConfigError if the machine lacks a device of the config."""
    import torch

    placement, own = build_placement(config), config.server_devices
    return torch.device(placement.device(own[0] if own and config.trains_apart else placement.devices[0]))


def _num_accelerators() -> int:
    """Number of this machine's accelerators. Imports torch only if there may be any."""
    if "torch" not in sys.modules and sys.platform == "linux" and not any(map(os.path.exists, _DRIVERS)):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cpu_threads(config: AgenticConfig | SFTConfig, num_threads: int) -> CpuThreads:
    """Numbers of threads for training and for rollouts. If `cpu_split` sets only one number, the other is the rest, at least 1;
    if it sets neither, each is half of `num_threads`. Synchronous runs don't divide them: each is `num_threads`."""
    if isinstance(config, SFTConfig) or not config.plays_ahead:
        return CpuThreads(num_threads, num_threads, num_threads)
    train, rollout = config.cpu_split.train, config.cpu_split.rollout
    num_train = train or max(1, num_threads - rollout if rollout else num_threads - num_threads // 2)
    return CpuThreads(num_train, rollout or max(1, num_threads - num_train), num_threads)


def set_torch_threads(num_threads: int) -> None:
    """Sets how many threads torch's operators use when the current thread calls them."""
    import torch

    # At its first use of torch, a thread adopts the number that any thread has set last. So torch is used before it is set.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)


def share_devices(
    config: AgenticConfig, placement: Placement, policy: "ServedPolicy", roles: Mapping[str, ModelRole]
) -> FreeForTransfer:
    """Makes the roles of a synchronous run share device memory. Returns the function that frees memory for a weight transfer;
    None on a CPU, and in asynchronous runs, whose roles compute at the same time."""
    if not placement.accelerator or config.plays_ahead:
        return None
    residents: dict[str, Resident] = {}
    for name, role in roles.items():
        if role.is_base:
            continue  # its workers are those of actor_train
        kinds: set[MemoryKind] = {"weights"}
        if STRATEGIES[config.roles[name].strategy_args.strategy_name].kind == "train":
            kinds.add("optimizer")
        if name == "actor_train" and not policy.servers.info().needs_weights:
            kinds.remove("weights")  # the server reads these very tensors
        offload, onload = (partial(role.workers.call, method) for method in ("offload", "onload"))
        residents[name] = Resident(frozenset(placement.roles[name].devices), frozenset(kinds), offload, onload)
    devices, servers = frozenset(config.server_devices or placement.devices[:1]), policy.servers
    residents["actor_infer"] = Resident(devices, servers.info().sleeps, servers.sleep, servers.wake)
    shared = SharedDevices(residents)

    def claim_devices(role: str, kinds: Collection[MemoryKind] | None) -> None:
        policy.event_loop.run(shared.claim(role, kinds))

    for role in roles.values():
        role.claim_devices = claim_devices
    policy.servers.claim_devices = lambda: shared.claim("actor_infer")
    return shared.free_for_transfer
