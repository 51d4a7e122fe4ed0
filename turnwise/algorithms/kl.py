"""Estimators of KL(p ‖ q) from tokens sampled from p (Schulman, "Approximating KL Divergence", 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from turnwise.spec import KLEstimator

MAX_EXPONENT = 20.0
"""Bound of log-prob differences before they are exponentiated: exp(20) ≈ 5e8 is finite in fp32."""


def k1(difference: Tensor) -> Tensor:
    """d: unbiased, may be negative. Its expected *gradient* is zero, so it can't be a loss."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    """|d|: a distance, not an estimate of the KL."""
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """½d²: biased, low variance; its expected gradient is that of the reverse KL."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """exp(−d) + d − 1: unbiased, never negative."""
    bounded = difference.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return torch.exp(-bounded) + bounded - 1.0


KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor], Tensor]] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}


def kl_divergence(logprobs: Tensor, base_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL of each token [N] between the policy that sampled it and a base, d = `logprobs` − `base_logprobs`.

    >>> lp, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5])
    >>> kl_divergence(lp, ref, "k3")
    tensor([0.0187, 0.1487, 0.0000])
    """
    return KL_ESTIMATORS[estimator](logprobs - base_logprobs)
