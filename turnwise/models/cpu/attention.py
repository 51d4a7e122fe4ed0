"""Attention over packed sequences and shared prefixes with turnwise's own kernels, in float32 on a CPU."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise.models.cpu.build import LANES, load_kernels
from turnwise.types import IntArray

_MOST_NUMBERS = 2**15
"""Maximum of path length × head size for the kernels. Beyond it SDPA is at least as fast: its blocks fit the
caches."""


class Branches(NamedTuple):
    """Which keys each query sees. The queries of branch b are the tokens `starts[b] : starts[b + 1]`, the
    last tokens of its path `paths[ends[b] : ends[b + 1]]`. Each query sees the keys of the path up to its own
    token."""

    starts: IntArray  # [B + 1]
    paths: IntArray  # [Σ path lengths]
    ends: IntArray  # [B + 1]

    @classmethod
    def of(
        cls,
        branch_lengths: tuple[int, ...],
        path_lengths: tuple[int, ...],
        paths: IntArray | None,
    ) -> "Branches":
        """Branches of these lengths with the concatenated `paths`. Without `paths` each branch is its own
        path.

        >>> Branches.of((3, 2), (3, 2), None).paths
        array([0, 1, 2, 3, 4])
        """
        starts = np.cumsum((0, *branch_lengths), dtype=np.int64)
        ends = np.cumsum((0, *path_lengths), dtype=np.int64)
        if paths is None:
            paths = np.arange(ends[-1])
        return cls(starts, np.ascontiguousarray(paths, np.int64), ends)

    @property
    def longest(self) -> int:
        return int(np.diff(self.ends).max())

    def pointers(self) -> tuple[int, int, int]:
        return self.starts.ctypes.data, self.paths.ctypes.data, self.ends.ctypes.data


def attention_kernels(tensors: Sequence[Tensor], branches: Branches) -> ctypes.CDLL | None:
    """The kernels; None if off, unfit for these `tensors` (query, key, value [1, heads, N, D]), or slower
    than SDPA."""
    heads = tensors[0].shape[1]
    size = tensors[0].shape[-1]
    for tensor in tensors:
        is_plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.dtype == torch.float32
        if not is_plain or tensor.shape[-1] != size or heads % tensor.shape[1]:
            return None
    if size % LANES or torch.is_autocast_enabled("cpu") or branches.longest * size > _MOST_NUMBERS:
        return None
    return load_kernels()


class BranchAttention(torch.autograd.Function):
    """Causal attention [N, H, D] of queries [N, H, D] over keys and values [N, Hkv, D]: each branch attends
    to its path."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        branches: Branches,
        scale: float,
        kernels: ctypes.CDLL,
    ) -> Tensor:
        query = query.contiguous()
        key = key.contiguous()
        value = value.contiguous()
        out = torch.empty_like(query)
        log_sums = query.new_empty(query.shape[:2])
        sizes = (len(branches.starts) - 1, query.shape[1], key.shape[1], query.shape[2], branches.longest)
        has_failed = kernels.attend_branches(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            *branches.pointers(),
            scale,
            out.data_ptr(),
            log_sums.data_ptr(),
            *sizes,
            torch.get_num_threads(),
        )
        _check(has_failed)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.branches = branches
        ctx.scale = scale
        ctx.kernels = kernels
        ctx.sizes = sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        grad = grad.contiguous()
        q_grad = torch.empty_like(query)
        k_grad = torch.zeros_like(key)
        v_grad = torch.zeros_like(value)
        room = key.new_empty(2, len(ctx.branches.paths), *key.shape[1:])
        inputs = [tensor.data_ptr() for tensor in (grad, query, key, value, out, log_sums)]
        outputs = [tensor.data_ptr() for tensor in (q_grad, k_grad, v_grad, room[0], room[1])]
        has_failed = ctx.kernels.attend_branches_backward(
            *inputs,
            *ctx.branches.pointers(),
            ctx.scale,
            *outputs,
            *ctx.sizes,
            torch.get_num_threads(),
        )
        _check(has_failed)
        return q_grad, k_grad, v_grad, None, None, None


def _check(has_failed: int) -> None:
    if has_failed:
        raise MemoryError("no memory is left for the attention of one sequence; lower sequence_length")
