"""Where the roles of a config live on this machine. torch is imported only where it is needed, for `turnwise config`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from turnwise.cluster.placement import CpuThreads, Placement, place, require_devices
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.runtime.rank import launched

if TYPE_CHECKING:
    import torch

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of these files is there if Linux has a driver of accelerators."""


def build_placement(config: AgenticConfig | SFTConfig, is_apart: bool = False) -> Placement:
    """The placement of the training roles. `is_apart` asks for processes beside the rollouts.

    Raises:
        ConfigError: the machine lacks a device, also one of the servers, or the cluster that is asked for can't hold the roles.
    """
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
    if own := _of_servers(config):
        require_devices("actor_infer", own, num_devices, accelerator)
    return placement


def use_launched(config: AgenticConfig | SFTConfig) -> None:
    """Gives the trainer a device for each process that a launcher has started, unless the config names devices."""
    if (size := launched()[1]) > 1:
        trainer = config if isinstance(config, SFTConfig) else config.actor_train
        trainer.fill(device_mapping=list(range(size)))


def sampling_device(config: AgenticConfig) -> torch.device:
    """The device of the servers in this process: the trainer's first, or their own where other processes train.

    Raises:
        ConfigError: the machine lacks it.
    """
    import torch

    placement, own = build_placement(config), _of_servers(config)
    return torch.device(placement.device(own[0] if own and config.trains_apart else placement.devices[0]))


def _of_servers(config: AgenticConfig | SFTConfig) -> list[int] | None:
    """The devices of the servers, if they are others than the trainer's."""
    if isinstance(config, SFTConfig) or not (config.trains_apart or config.num_replicas > 1):
        return None
    return config.actor_infer.device_mapping


def _num_accelerators() -> int:
    """The accelerators of this machine. Without a driver there is none, which is known without torch."""
    if "torch" not in sys.modules and sys.platform == "linux" and not any(map(os.path.exists, _DRIVERS)):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cpu_threads(config: AgenticConfig | SFTConfig, num_threads: int) -> CpuThreads:
    """`cpu_split`. A missing number is half of the threads, or what the other side leaves, and at least one. Synchronous runs
    take turns, so that each side has all threads."""
    if isinstance(config, SFTConfig) or not config.plays_ahead:
        return CpuThreads(num_threads, num_threads, num_threads)
    train, rollout = config.cpu_split.train, config.cpu_split.rollout
    half = num_threads - num_threads // 2
    chosen_train = train or max(1, num_threads - rollout if rollout else half)
    return CpuThreads(chosen_train, rollout or max(1, num_threads - chosen_train), num_threads)


def set_torch_threads(num_threads: int) -> None:
    """Sets the number of threads for operators called by this thread."""
    import torch

    # A thread takes over the last number set by any thread when it first needs one, so it must have needed one before.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)
