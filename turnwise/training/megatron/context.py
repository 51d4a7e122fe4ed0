"""The tokens of packed samples that one context-parallel rank computes, and how results of all ranks come
together. This module doesn't import Megatron."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.types import Batch

Add = Callable[[Tensor], None]
"""Replaces a tensor by the sum of those of all context-parallel ranks."""


@dataclass(frozen=True, slots=True)
class TokenShare:
    """The tokens of a packed batch that one rank computes, with filling where numbers must divide.

    One of several ranks: each sample is filled up to 2 × ranks pieces of equal length, and rank r has piece r
    and the r-th from the end, so that causal attention costs all ranks alike. TransformerEngine's kernels
    expect this order (Llama 3 herd of models 2024, arXiv:2407.21783, section 3.3.2). What fills a sample
    comes behind it, where none of its tokens attends to it."""

    token_ids: Tensor
    """[M]"""
    position_ids: Tensor
    """[M]"""
    lengths: Sequence[int]
    """Numbers of tokens of the samples on all ranks together, with what fills them."""
    rows: Tensor | None = None
    """[M]: the place in the batch of each token, -1 for filling; None if they are the batch's, in its
    order."""

    @classmethod
    def of(cls, batch: Batch, num_ranks: int = 1, rank: int = 0, divisor: int = 1) -> "TokenShare":
        """What rank `rank` of `num_ranks` has. M is a multiple of `divisor`."""
        if num_ranks == 1:
            return cls._whole(batch, divisor)
        lengths: list[int] = []
        rows: list[Tensor] = []
        positions: list[Tensor] = []
        start = 0
        for length in batch.lengths:
            filled = length + -length % (2 * num_ranks * divisor)
            places = torch.arange(filled)
            pieces = places.chunk(2 * num_ranks)
            mine = torch.cat([pieces[rank], pieces[2 * num_ranks - 1 - rank]])
            rows.append(torch.where(mine < length, start + mine, -1))
            positions.append(mine)
            lengths.append(filled)
            start += length
        device = batch.token_ids.device
        all_rows = torch.cat(rows).to(device)
        token_ids = batch.token_ids[all_rows.clamp(min=0)].where(all_rows >= 0, 0)
        return cls(token_ids, torch.cat(positions).to(device), lengths, all_rows)

    @classmethod
    def _whole(cls, batch: Batch, divisor: int) -> "TokenShare":
        """All tokens, and another sequence behind them where their number must have a divisor."""
        num_missing = -batch.num_tokens % divisor
        if not num_missing:
            return cls(batch.token_ids, batch.position_ids, batch.lengths)
        token_ids = _filled(batch.token_ids, num_missing)
        position_ids = _filled(batch.position_ids, num_missing)
        return cls(token_ids, position_ids, [*batch.lengths, num_missing])

    @classmethod
    def of_sequence(cls, token_ids: Tensor, divisor: int = 1) -> "TokenShare":
        """All tokens of one sequence."""
        token_ids = _filled(token_ids, -len(token_ids) % divisor)
        position_ids = torch.arange(len(token_ids), device=token_ids.device)
        return cls(token_ids, position_ids, [len(token_ids)])

    def held(self, tokens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """`(chosen, places)` for places `tokens` [K] in a batch of `num_tokens`: which of them this rank has,
        bool [K], and where they are among its own tokens, [number of those chosen]."""
        if self.rows is None:
            return torch.ones_like(tokens, dtype=torch.bool), tokens
        is_real = self.rows >= 0
        place_of = self.rows.new_full((num_tokens,), -1)
        place_of[self.rows[is_real]] = is_real.nonzero().squeeze(-1)
        places = place_of[tokens]
        return places >= 0, places[places >= 0]


def _filled(values: Tensor, number: int) -> Tensor:
    return torch.cat([values, values.new_zeros(number)])


def whole(values: Tensor, add: Add | None) -> Tensor:
    """The values of all ranks' tokens, [N] each, given those of one rank, which are 0 at tokens of other
    ranks. Differentiable: since each rank computes the same loss of the whole, its own tokens' gradients are
    complete, and nothing is added up on the way back."""
    if add is None:
        return values
    joined: Tensor = _Joined.apply(values, add)
    return joined


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, add: Add) -> Tensor:
        joined = values.contiguous().clone()
        add(joined)
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
