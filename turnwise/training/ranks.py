"""Data-parallel ranks of a role: each holds the whole model and trains on a share of the samples."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from turnwise.runtime.rank import RankContext
from turnwise.runtime.torch_group import group_of

T = TypeVar("T")

_BUCKET_BYTES = 2**28
"""Maximum bytes of gradients in one message, so that the copy which is sent stays small. A larger gradient is
sent alone."""


class Ranks:
    """Communication between the ranks of a role, which must all call the same methods in the same order. With
    one rank nothing is sent, and no process group is needed."""

    def __init__(self, context: RankContext | None = None) -> None:
        self.context = context or RankContext()
        self.is_one = self.context.world_size == 1
        self.group: dist.ProcessGroup | None = None if self.is_one else group_of(self.context.peers)
        """The process group of the ranks; None for all processes of the run, and for one rank."""

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites the tensors with those of the first rank."""
        if self.is_one:
            return
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=self.context.peers[0], group=self.group)

    @property
    def number(self) -> int:
        """The number of this rank in the group, which torch sorts by process."""
        return 0 if self.is_one else dist.get_rank(self.group)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on each. They are pickled."""
        if self.is_one:
            return [value]
        values: list[Any] = [None] * self.context.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def raise_any(self, fault: OSError | None) -> None:
        """Raises on all ranks the fault of the first rank that has one."""
        for error in self.gather(fault):
            if error is not None:
                raise error

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Gives every rank the sum of all ranks' gradients. A parameter that has a gradient on no rank keeps
        none."""
        if self.is_one or not parameters:
            return
        flags = [parameter.grad is not None for parameter in parameters]
        has_gradient = torch.tensor(flags, device=parameters[0].device).int()
        dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=self.group)
        gradients = []
        for parameter, has_any in zip(parameters, has_gradient.tolist(), strict=True):
            if not has_any:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            self._sum(bucket)

    def _sum(self, bucket: Sequence[Tensor]) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=self.group)
        sums = flat.split([gradient.numel() for gradient in bucket])
        for gradient, summed in zip(bucket, sums, strict=True):
            gradient.copy_(summed.view_as(gradient))

    def all(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on every rank."""
        if self.is_one:
            return flag
        flags = torch.tensor([flag], device=device).int()
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flags.item())


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Splits the gradients into buckets: consecutive ones of one dtype, `_BUCKET_BYTES` at most, or one
    larger gradient."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        num_bytes = sum(member.nbytes for member in bucket)
        is_full = num_bytes + gradient.nbytes > _BUCKET_BYTES
        if bucket and (is_full or bucket[0].dtype != gradient.dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
