"""Combines losses of tokens into the loss of an optimiser step, for every `loss_agg_mode`.

All four modes are linear in the token losses, so a mode is a factor for each token, already divided by the denominators of
the *whole* optimiser step. Sums over micro-batches and ranks then add up to the same loss however the step was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.algorithms.masks import replace_outside
from turnwise.spec import LossAggMode
from turnwise.types import Denominators


def tokens_per_sequence(mask: Tensor, sequence_id: Tensor, num_sequences: int) -> Tensor:
    """Σ m of each sequence [S], from `mask` and `sequence_id` [N].

    >>> tokens_per_sequence(torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 1]), 3)
    tensor([2., 1., 0.])
    """
    counts = torch.zeros(num_sequences, dtype=torch.float32, device=mask.device)
    return counts.index_add(0, sequence_id, mask.to(torch.float32))


def token_factors(
    mask: Tensor, weights: Tensor, sequence_id: Tensor, num_sequences: int, denominators: Denominators, mode: LossAggMode
) -> Tensor:
    """The factor of each token's loss [N]; 0 outside the mask. With weight w, m the mask, N and B the step's
    weighted numbers of trained tokens and of sequences that have one:

    - `token-mean`: w·m / N
    - `seq-mean-token-sum`: w·m / B
    - `seq-mean-token-mean`: w·m / (B·Σm of its sequence), exact because a sequence is never cut over micro-batches
    - `seq-mean-token-sum-norm`: w·m / (B·T_max), T_max a constant (Liu et al. 2025, "Dr. GRPO")
    """
    share = replace_outside(weights.to(torch.float32), mask)
    denominator = step_denominator(denominators, mode)
    if mode == "seq-mean-token-sum-norm":
        denominator *= denominators.max_length
    if mode == "seq-mean-token-mean":
        share = share / tokens_per_sequence(mask, sequence_id, num_sequences).clamp(min=1)[sequence_id]
    return share / denominator if denominator > 0 else torch.zeros_like(share)


def step_denominator(denominators: Denominators, mode: LossAggMode) -> float:
    """The denominator of a step that grows with its samples: N or B."""
    return denominators.num_tokens if mode == "token-mean" else denominators.num_sequences


def aggregate(losses: Tensor, mask: Tensor, factors: Tensor) -> Tensor:
    """Σ factor·L over the mask: this micro-batch's part of the step's loss, from three arrays [N].

    >>> from typing import get_args
    >>> losses = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
    >>> mask = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0]).bool()
    >>> step = Denominators(num_tokens=5, num_sequences=2, max_length=4)
    >>> for mode in get_args(LossAggMode):
    ...     factors = token_factors(mask, torch.ones(8), torch.tensor([0] * 4 + [1] * 4), 2, step, mode)
    ...     print(mode, round(aggregate(losses, mask, factors).item(), 6))
    token-mean 4.2
    seq-mean-token-sum 10.5
    seq-mean-token-mean 3.75
    seq-mean-token-sum-norm 2.625
    """
    return (replace_outside(losses, mask) * factors).sum()
