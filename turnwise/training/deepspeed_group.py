"""DeepSpeed among the ranks of one role. It takes all processes of torch's default group for its own, and
waits for all of them where it names no group."""

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from turnwise.errors import ConfigError
from turnwise.runtime.rank import RankContext
from turnwise.runtime.torch_group import require_group, subgroup


class RoleBackend:
    """DeepSpeed's backend `world`, for which the world is `group`: the processes `peers` of torch's default
    group, in their order. Its methods have the parameters of torch's functions. Where no group or this one is
    given, a process is named by its rank in it; otherwise by torch's own number."""

    def __init__(self, world: Any, group: Any, peers: Sequence[int]) -> None:
        self.peers = tuple(peers)
        self._world = world
        self._group = group

    def __getattr__(self, name: str) -> Any:
        # What isn't defined here is called with a group.
        return getattr(self._world, name)

    def get_world_group(self) -> Any:
        return self._group

    def get_rank(self, group: Any = None) -> int:
        return dist.get_rank(group or self._group)

    def get_world_size(self, group: Any = None) -> int:
        return dist.get_world_size(group or self._group)

    def new_group(self, ranks: Sequence[int]) -> Any:
        # Only members call this: the other processes of the run don't take part.
        processes = [self.peers[rank] for rank in ranks]
        return dist.new_group(processes, use_local_synchronization=True)

    def barrier(self, group: Any = None, **options: Any) -> Any:
        return self._world.barrier(group=group or self._group, **options)

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        return self._world.all_reduce(tensor, op, group or self._group, async_op)

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        return self._world.broadcast(tensor, self._process(src, group), group or self._group, async_op)

    def broadcast_object_list(
        self, object_list: list[Any], src: int, group: Any = None, device: Any = None
    ) -> Any:
        source = self._process(src, group)
        return self._world.broadcast_object_list(object_list, source, group or self._group, device)

    def _process(self, rank: int, group: Any) -> int:
        """The number by which torch knows a process."""
        if group is None or group == self._group:
            return self.peers[rank]
        return rank


def join_role(deepspeed: ModuleType, device: torch.device, context: RankContext) -> None:
    """Makes DeepSpeed's world that of the role, and torch's default group if this is the run's only process.
    Raises ConfigError if DeepSpeed trains a role in this process already whose ranks are other processes."""
    require_group(device.type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    comm = deepspeed.comm.comm
    # torch sorts the processes of a group, which a device_mapping may name in another order.
    peers = tuple(sorted(context.peers))
    known = tuple(range(dist.get_world_size()))
    if isinstance(comm.cdb, RoleBackend):
        known = comm.cdb.peers
    if comm.cdb is not None and known != peers:
        raise ConfigError(
            f"{context.role}: DeepSpeed trains a role on the processes {list(known)} here already, and this "
            f"one is on {list(peers)}; give both the same device_mapping, or use fsdp2_train"
        )
    if comm.cdb is None and context.world_size < dist.get_world_size():
        # Its own sums on a CPU, which training doesn't use, would wait for the processes of other roles.
        deepspeed.comm.torch.build_shm_op = lambda: None
        comm.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)
        comm.cdb = RoleBackend(comm.cdb, subgroup(context.peers), peers)
