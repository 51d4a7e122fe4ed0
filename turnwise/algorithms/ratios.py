"""Means and sums of token quantities over turns and sequences, such as those in the exponents of probability
ratios."""

from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.algorithms.masks import replace_outside
from turnwise.spec import Granularity
from turnwise.types import Batch


@dataclass(frozen=True, slots=True)
class Spans:
    """The turn and the sequence of each of N tokens. Means and sums include only the tokens of `mask`, bool
    [N].

    >>> mask = torch.tensor([False, True, True, True])
    >>> spans = Spans(mask, torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 0, 0]))
    >>> x = torch.tensor([float("nan"), 1.0, 3.0, 5.0])
    >>> [spans.over(x, name)[1:].tolist() for name in ("token", "segment", "geometric", "sequence")]
    [[1.0, 3.0, 5.0], [2.0, 2.0, 5.0], [3.0, 3.0, 3.0], [9.0, 9.0, 9.0]]
    """

    mask: Tensor
    turn_id: Tensor  # int64 [N], one number per turn of the batch, below N; arbitrary where the mask is false
    sequence_id: Tensor  # int64 [N], below N

    @classmethod
    def of(cls, batch: Batch) -> "Spans":
        """The spans of a batch of tensors. Turns, which a batch numbers from 0 in each sequence, get distinct
        numbers."""
        number = batch.sequence_id * (batch.turn_id.max() + 2) + batch.turn_id
        _, turn_id = torch.unique(number, return_inverse=True)
        return cls(batch.response_mask, turn_id, batch.sequence_id)

    def over(self, x: Tensor, granularity: Granularity) -> Tensor:
        """`x` [N] itself (`token`), or for each token the mean over its turn (`segment`) or its sequence
        (`geometric`), or the sum over its sequence (`sequence`). Gradients flow into every token of a mean or
        sum. Forward and backward pass add up in float64: in float32 a sum over 64k tokens is off by 1e-3."""
        if granularity == "token":
            return x
        ids = self.turn_id if granularity == "segment" else self.sequence_id
        exact = replace_outside(x, self.mask).double()
        totals = torch.zeros_like(exact).index_add(0, ids, exact)
        if granularity != "sequence":
            counts = torch.zeros_like(exact).index_add(0, ids, self.mask.double())
            totals = totals / counts.clamp(min=1)
        return totals[ids].to(x.dtype)
