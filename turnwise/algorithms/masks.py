"""Statistics over the trained tokens only.

Inputs are *replaced* where the mask is 0: a NaN there must change neither values nor gradients, and multiplying by 0 would keep
it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def replace_outside(x: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """`x` [N] where `mask` [N] is true, `value` elsewhere, with no gradient there.

    >>> replace_outside(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return torch.where(mask, x, torch.full_like(x, value))


def masked_mean(x: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Σ w·m·x / Σ w·m of `x`, `mask` and `weights` [N]; 0 for an empty mask.

    >>> masked_mean(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])).item()
    2.0
    """
    share = mask.to(x.dtype) if weights is None else mask * weights.to(x.dtype)
    total = share.sum()
    return (replace_outside(x, mask) * share).sum() / torch.where(total > 0, total, torch.ones_like(total))


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance of `x` [N] over `mask` [N]; 0 for fewer than two tokens.

    >>> masked_var(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])).item()
    2.0
    """
    x = replace_outside(x, mask)
    deviation = replace_outside(x - masked_mean(x, mask), mask)
    return deviation.square().sum() / (mask.sum() - 1).clamp(min=1)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x − μ) / sqrt(var + 1e-8) over `mask` [N], 0 outside. One token alone has no variance and stays as it is.

    >>> whiten(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([True, True, True, False]))
    tensor([-1.,  0.,  1.,  0.])
    """
    x = replace_outside(x, mask)
    centred = (x - masked_mean(x, mask)) / torch.sqrt(masked_var(x, mask) + 1e-8)
    return replace_outside(torch.where(mask.sum() > 1, centred, x), mask)
