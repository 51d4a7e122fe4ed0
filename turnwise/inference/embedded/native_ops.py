"""A layer's operations by the library's own kernels: float32 on a CPU, one pass over memory each."""

from __future__ import annotations

import ctypes
from collections.abc import Set
from functools import partial

import torch
from torch import Tensor

from turnwise.errors import ServerError
from turnwise.inference.embedded.cache import KVCache
from turnwise.inference.embedded.layer_ops import HeadShape, MakeOps
from turnwise.inference.embedded.runner import Step
from turnwise.inference.embedded.torch_ops import TorchOps
from turnwise.kernels.build import LANES, load_kernels


class NativeOps:
    """`LayerOps` over `kernels/decoder.c`. What they make of a token doesn't depend on what else is in the batch.

    Raises:
        IndexError: the cache has no such slot or position.
    """

    def __init__(self, step: Step, shape: HeadShape, cache: KVCache, rotary: Tensor, *, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels
        self._shape = shape
        self._cache = cache
        self._rotary = rotary
        self._slots = step.slots[step.rows]
        self._positions = step.positions
        # Where slots read the beginning of their context.
        self._bases, self._splits = cache.prefixes.bases, cache.prefixes.splits
        if self._slots.max() >= cache.num_slots or self._positions.max() >= min(cache.length, len(rotary)):
            raise IndexError(f"a step goes beyond a cache of {cache.num_slots} slots of {cache.length} tokens")
        self._sizes = (len(step.rows), shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._num_threads = torch.get_num_threads()

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out, (num_rows, size) = torch.empty_like(x), x.shape
        pointers = x.data_ptr(), weight.data_ptr(), self._shape.eps, out.data_ptr()
        self._kernels.rms_norm(*pointers, num_rows, size, self._num_threads)
        return out

    def place_heads(self, layer: int, qkv: Tensor, norms: Tensor | None) -> Tensor:
        queries = qkv.new_empty(len(qkv), self._shape.num_heads, self._shape.head_dim)
        self._kernels.place_heads(
            qkv.data_ptr(),
            norms.data_ptr() if norms is not None else None,
            self._shape.eps,
            self._rotary.data_ptr(),
            self._slots.ctypes.data,
            self._positions.ctypes.data,
            queries.data_ptr(),
            self._cache.keys[layer].data_ptr(),
            self._cache.values[layer].data_ptr(),
            *self._sizes,
            self._cache.keys[layer].shape[2],
            self._num_threads,
        )
        return queries

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        out = torch.empty_like(queries)
        failed = self._kernels.attend(
            queries.data_ptr(),
            self._cache.keys[layer].data_ptr(),
            self._cache.values[layer].data_ptr(),
            self._slots.ctypes.data,
            self._positions.ctypes.data,
            self._bases.ctypes.data,
            self._splits.ctypes.data,
            self._shape.scale,
            out.data_ptr(),
            *self._sizes,
            self._cache.keys[layer].shape[2],
            self._num_threads,
        )
        if failed:
            raise ServerError(
                "no memory is left for the attention scores of one token; lower max_concurrency or sequence_length"
            )
        return out.view(len(out), -1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, size)
        self._kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), num_rows, size, self._num_threads)
        return out


def choose_ops(shape: HeadShape, dtypes: Set[torch.dtype], device: torch.device) -> MakeOps:
    """The library's own kernels where they fit parameters of these dtypes and can be compiled, else torch's."""
    fits = device.type == "cpu" and dtypes == {torch.float32} and shape.head_dim % LANES == 0
    kernels = load_kernels() if fits else None
    return TorchOps if kernels is None else partial(NativeOps, kernels=kernels)
