"""Means over trained tokens. Inputs are *replaced* where the mask is 0, since a NaN there would survive a
product with 0."""

from collections.abc import Mapping

import torch
from torch import Tensor

from turnwise.types import Metric


def replace_outside(x: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """`x` [N] where `mask` [N] is true; elsewhere `value`, without a gradient.

    >>> replace_outside(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return torch.where(mask, x, torch.full_like(x, value))


def masked_mean(x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Σ w·m·x / Σ w·m of `x`, `mask` and `weights` [N]; 0 for an empty mask.

    >>> masked_mean(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]), torch.ones(3)).item()
    2.0
    """
    share = mask * weights.to(x.dtype)
    total = share.sum()
    divisor = torch.where(total > 0, total, torch.ones_like(total))
    weighted = replace_outside(x, mask) * share
    return weighted.sum() / divisor


def mean_metrics(measured: Mapping[str, Tensor], mask: Tensor, weights: Tensor) -> list[Metric]:
    """The `masked_mean` of each tensor [N], without a gradient, under its name. A metric's weight is Σ
    w·m."""
    count = replace_outside(weights, mask).sum()
    metrics = []
    for name, x in measured.items():
        mean = masked_mean(x.detach().float(), mask, weights)
        metrics.append(Metric(name, mean, weight=count))
    return metrics
