"""Stands for TransformerEngine's attention on a CPU, where several ranks share the tokens of packed samples:
each gathers all keys and values. Import this only where Megatron is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from torch import Tensor, nn

from turnwise.training.megatron import startup, strategy


class GatheringAttention(nn.Module):
    """Causal attention of this rank's queries over whole samples. Of a sample in 2n pieces, rank r of n has
    piece r and the r-th from the end."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """`query` [M, heads, D], `key` and `value` [M, groups, D] of this rank."""
        group = parallel_state.get_context_parallel_group()
        size = group.size()
        keys = _Gathered.apply(key, group)
        values = _Gathered.apply(value, group)
        repeats = query.shape[1] // key.shape[1]
        results: list[Tensor] = []
        start = 0
        for length in packed_seq_params.cu_seqlens_q.diff().tolist():
            stop = start + length // size
            positions = [_positions(length, size, rank) for rank in range(size)]
            places = torch.cat(positions)
            of_sample = [
                torch.cat([*tensors[:, start:stop]])[places.argsort()].repeat_interleave(repeats, 1)
                for tensors in (keys, values)
            ]
            scores = torch.einsum("qhd,khd->hqk", query[start:stop], of_sample[0]) * self.scale
            is_later = torch.arange(length) > positions[group.rank()][:, None]
            weights = scores.masked_fill(is_later, float("-inf")).softmax(-1)
            results.append(torch.einsum("hqk,khd->qhd", weights, of_sample[1]))
            start = stop
        return torch.cat(results).flatten(1)


def _positions(length: int, size: int, rank: int) -> Tensor:
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[-1 - rank]])


class _Gathered(torch.autograd.Function):
    """[ranks, M, …], the tensors of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        gathered = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(gathered, tensor.contiguous(), group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.group.rank()], None


@contextmanager
def on_kernels() -> Iterator[None]:
    """In this context strategies are made as on a GPU, with this attention as its kernels."""
    replaced = {
        (transformer_engine, "TEDotProductAttention"): GatheringAttention,
        (startup, "Decoder"): lambda **fields: decoder(**{**fields, "packs_kernels": True}),
        (strategy, "require_kernels"): lambda *_: None,
    }
    decoder = startup.Decoder
    before = {place: getattr(*place) for place in replaced}
    try:
        for place, stand_in in replaced.items():
            setattr(*place, stand_in)
        yield
    finally:
        for place, original in before.items():
            setattr(*place, original)
