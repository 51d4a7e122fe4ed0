"""Torch's process groups for the processes of a run."""

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from turnwise.errors import WorkerError

_JOIN_S = 120.0
"""Seconds that a process waits for the others to join. The run's deadlines, not this, bound later waits in
all-reduces."""
_SUM_S = 24 * 3600.0
_POLL_S = 0.02


_groups: dict[tuple[int, ...], Any] = {}  # the groups of some of the processes, by their ranks


def form_groups(groups: Sequence[tuple[int, ...]]) -> None:
    """Makes a process group for each tuple of ranks. Every process must call this with the same groups,
    member or not."""
    _groups.clear()
    for ranks in groups:
        _groups[ranks] = dist.new_group(list(ranks))


def group_of(ranks: tuple[int, ...]) -> Any:
    """The process group of these ranks; None for all ranks, since torch takes None as the default group."""
    if len(ranks) == dist.get_world_size():
        return None
    return _groups[ranks]


def require_group(device: str) -> None:
    """Makes the default process group of a process that is the run's only one, if there is none."""
    if not dist.is_initialized():
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def mesh_groups(ranks: Sequence[int], size: int, device_type: str) -> tuple[Any, Any]:
    """Two process groups of this process, one of `ranks`, which are divided into rows of `size` each: the
    processes at its place in all rows, and those of its row. Every process of `ranks` must call this. A
    process without any group, which must be the only one, gets one of its own."""
    require_group(device_type)
    number = dist.get_rank()
    row = list(ranks).index(number) // size
    place = list(ranks).index(number) % size
    return subgroup(ranks[place::size]), subgroup(ranks[row * size : (row + 1) * size])


def subgroup(ranks: Sequence[int]) -> Any:
    """The process group of these ranks, one of which is this process. All of them must call this."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if tuple(ranks) in _groups:
        return _groups[tuple(ranks)]
    # Only members call this, so that roles on other processes needn't take part.
    return dist.new_group(list(ranks), use_local_synchronization=True)


class Meeting(NamedTuple):
    """Where the processes of a run meet: the address and port of a store that rank 0's process keeps."""

    host: str
    port: int
    interface: str = ""
    """The network interface of each machine for what they send; empty for that of the way to `host`."""


def open_store(host: str) -> dist.TCPStore:
    """A store at a free port of this node, which other processes reach at the address `host`. It exists as
    long as this object does."""
    timeout = timedelta(seconds=_JOIN_S)
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)


def join_processes(
    rendezvous: str | Meeting | None, rank: int, world_size: int, device: str, interface: str = ""
) -> None:
    """Joins the default process group of the run's processes. They meet through the file `rendezvous`, at a
    store, or at their launcher's address if `rendezvous` is None. NCCL connects GPUs, gloo the rest, over the
    network `interface` (empty: loopback, for processes of one machine) unless GLOO_SOCKET_IFNAME names
    another. Raises WorkerError if joining fails."""
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface or ("lo0" if sys.platform == "darwin" else "lo")
    if interface and not os.environ.get("NCCL_SOCKET_IFNAME"):
        os.environ["NCCL_SOCKET_IFNAME"] = interface
    backend = "gloo"
    if device.startswith("cuda"):
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise WorkerError(
                f"rank {rank} of {world_size} is to train on {device} over NCCL, but its torch "
                f"{torch.__version__} sees no GPU or has no NCCL; give all processes the same torch and the "
                "same CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    try:
        if rendezvous is None:
            store, *_ = next(
                dist.rendezvous(
                    "env://",
                    rank,
                    world_size,
                    timeout=timedelta(seconds=_JOIN_S),
                )
            )
        elif isinstance(rendezvous, Meeting):
            store = dist.TCPStore(
                rendezvous.host, rendezvous.port, is_master=False, timeout=timedelta(seconds=_JOIN_S)
            )
        else:
            store = dist.FileStore(rendezvous, world_size)
        _rendezvous(store, rank, world_size)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_SUM_S),
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error)
        if "EADDRINUSE" in reason:
            reason = (
                f"port {os.environ.get('MASTER_PORT')} is taken; give the launcher another one "
                "(--master_port of torchrun, --main_process_port of accelerate)"
            )
        raise WorkerError(
            f"rank {rank} of {world_size} could not join the others ({backend}): {reason}"
        ) from error


def _rendezvous(store: dist.Store, rank: int, world_size: int) -> None:
    """Waits until all processes have arrived. torch's own wait would last up to `_SUM_S` and ignore
    signals."""
    names = [f"rank {number}" for number in range(world_size)]
    store.set(names[rank], "")
    end = time.monotonic() + _JOIN_S
    while missing := [name for name in names if not store.check([name])]:
        if time.monotonic() > end:
            raise WorkerError(
                f"rank {rank} of {world_size} waited {_JOIN_S:g} s for {', '.join(missing)}; under a "
                "launcher the first process must train (turnwise train, sft or tool train, or a script with "
                "Trainer.train()) while they live"
            )
        time.sleep(_POLL_S)
