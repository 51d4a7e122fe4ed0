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
        starts, ends = (
            np.cumsum((0, *lengths), dtype=np.int64) for lengths in (branch_lengths, path_lengths)
        )
        return cls(
            starts,
            np.arange(ends[-1]) if paths is None else np.ascontiguousarray(paths, np.int64),
            ends,
        )

    @property
    def longest(self) -> int:
        return int(np.diff(self.ends).max())

    def pointers(self) -> tuple[int, int, int]:
        return self.starts.ctypes.data, self.paths.ctypes.data, self.ends.ctypes.data


def attention_kernels(tensors: Sequence[Tensor], branches: Branches) -> ctypes.CDLL | None:
    """The kernels; None if off, unfit for these `tensors` (query, key, value [1, heads, N, D]), or slower
    than SDPA."""
    heads, size = tensors[0].shape[1], tensors[0].shape[-1]
    is_plain = all(
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and tensor.shape[-1] == size
        for tensor in tensors
    )
    fits = is_plain and not size % LANES and not any(heads % tensor.shape[1] for tensor in tensors)
    if not fits or torch.is_autocast_enabled("cpu") or branches.longest * size > _MOST_NUMBERS:
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
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out, log_sums = torch.empty_like(query), query.new_empty(query.shape[:2])
        sizes = (len(branches.starts) - 1, query.shape[1], key.shape[1], query.shape[2], branches.longest)
        inputs = [tensor.data_ptr() for tensor in (query, key, value)]
        outputs = out.data_ptr(), log_sums.data_ptr()
        _check(
            kernels.attend_branches(
                *inputs,
                *branches.pointers(),
                scale,
                *outputs,
                *sizes,
                torch.get_num_threads(),
            )
        )
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.branches, ctx.scale, ctx.kernels, ctx.sizes = branches, scale, kernels, sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        grad = grad.contiguous()
        q_grad, k_grad, v_grad = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        room = key.new_empty(2, len(ctx.branches.paths), *key.shape[1:])
        inputs = [tensor.data_ptr() for tensor in (grad, query, key, value, out, log_sums)]
        outputs = [tensor.data_ptr() for tensor in (q_grad, k_grad, v_grad, room[0], room[1])]
        backward = ctx.kernels.attend_branches_backward
        _check(
            backward(
                *inputs,
                *ctx.branches.pointers(),
                ctx.scale,
                *outputs,
                *ctx.sizes,
                torch.get_num_threads(),
            )
        )
        return q_grad, k_grad, v_grad, None, None, None


def _check(has_failed: int) -> None:
    if has_failed:
        raise MemoryError("no memory is left for the attention of one sequence; lower sequence_length")
