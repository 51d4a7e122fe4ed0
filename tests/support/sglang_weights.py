"""SGLang's own transfer of weights, as `sglang_fake` has it: its routes, and a member of a process group.

The fields are those of `InitWeightsUpdateGroupReqInput` and `UpdateWeightsFromDistributedReqInput` in the
wheel of SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    default_pg_timeout,
)

from turnwise.transfer.buckets import Bucket
from turnwise.transfer.manifest import TensorSpec


class WeightRoutes:
    """Loads weights into a model as they come. Raises ValueError as SGLang refuses a request."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._groups: dict[str, Any] = {}
        self._is_open = False

    def join(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        self._groups[group_name] = new_group(
            backend=backend,
            init_method=f"tcp://{master_address}:{master_port}",
            world_size=world_size,
            rank=rank_offset,
            group_name=group_name,
        )

    def begin(self) -> None:
        if self._is_open:
            raise ValueError("a weight-update session is already open")
        self._is_open = True

    def receive(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        flush_cache: bool,
        load_format: str,
    ) -> None:
        if not self._is_open or load_format != "flattened_bucket" or flush_cache:
            raise ValueError("update_weights_from_distributed must run between begin and end")
        specs: dict[str, TensorSpec] = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            num_bytes = torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes
            specs[name] = TensorSpec(tuple(shape), dtype, num_bytes)
        bucket = Bucket(specs)
        data = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        try:
            self._groups[group_name].broadcast(data, 0).wait()
        except RuntimeError as error:
            raise ValueError(f"Failed to receive weights: {error}") from error
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in bucket.views(data):
                parameters[name].copy_(tensor)

    def end(self) -> None:
        if not self._is_open:
            raise ValueError("no weight-update session is open")
        self._is_open = False

    def leave(self, group_name: str) -> None:
        group = self._groups.pop(group_name)
        if group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._world.pg_map.pop(group)
            dist.distributed_c10d._world.pg_names.pop(group)


def new_group(backend: str, init_method: str, world_size: int, rank: int, group_name: str) -> Any:
    """A process group beside torch's default one, as trainers and engines make it to send weights."""
    store, rank, world_size = next(dist.rendezvous(init_method, rank, world_size))
    store = PrefixStore(group_name, store)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend),
        store,
        group_name=group_name,
        timeout=default_pg_timeout,
    )
    return group
