"""Estimators of KL(p ‖ q) from tokens sampled from p (Schulman, "Approximating KL Divergence", 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from turnwise.errors import ConfigError, nearest
from turnwise.spec import KL_ALIASES, KL_LOSSES

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


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}


def kl_divergence(logprobs: Tensor, base_logprobs: Tensor, estimator: str) -> Tensor:
    """KL of each token [N] between the policy that sampled it and a base, d = `logprobs` − `base_logprobs`.

    >>> lp, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5])
    >>> kl_divergence(lp, ref, "k3")
    tensor([0.0187, 0.1487, 0.0000])

    Raises:
        ConfigError: there is no such estimator.
    """
    name = KL_ALIASES.get(estimator, estimator)
    if name not in KL_ESTIMATORS:
        raise ConfigError(
            f"{estimator!r} isn't a KL estimator; kl_penalty is one of {', '.join(KL_ESTIMATORS)}."
            + nearest(estimator, KL_ESTIMATORS)
        )
    return KL_ESTIMATORS[name](logprobs - base_logprobs)


def check_loss_type(estimator: str) -> str:
    """`estimator` if its gradient is one of a KL, so that it may stand in a loss.

    Raises:
        ConfigError: it may not.
    """
    if KL_ALIASES.get(estimator, estimator) in KL_LOSSES:
        return estimator
    raise ConfigError(
        f"kl_loss_type {estimator!r} can't be a loss: the expected gradient of k1 is zero and abs estimates no KL. "
        f"Use {' or '.join(KL_LOSSES)} in kl_loss_type, or take the KL from the reward (add_token_level_kl)."
    )
