"""Chooses the tokens of an optimiser step that a `pg_variant` treats differently: those that lower the policy's entropy most.
Cov_t = (A_t − Ā)·(old_t − mean old) is a token's share of the covariance of advantage and log-prob. That covariance is the rate
at which the entropy falls (Cui et al. 2025, arXiv:2505.22617, section 4). Means are over all tokens of the step."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Covariances = NDArray[np.float64]
Chosen = NDArray[np.int64]


def token_covariances(advantages: Covariances, old_logprobs: Covariances) -> Covariances:
    """(A − Ā)(old − mean old) of `advantages` and `old_logprobs` [R].

    >>> token_covariances(np.array([1.0, -1.0]), np.array([-1.0, -3.0]))
    array([1., 1.])
    """
    return (advantages - advantages.mean()) * (old_logprobs - old_logprobs.mean())


def clip_cov(
    covariances: Covariances,
    seed: int,
    *,
    fraction: float,
    covariance_low: float,
    covariance_high: float,
    clip_low: float,
    clip_high: float,
) -> Chosen:
    """Indices of `fraction` of the tokens (or fewer), drawn where the covariance is in [covariance_low, covariance_high]."""
    eligible = np.flatnonzero((covariances >= covariance_low) & (covariances <= covariance_high))
    number = min(_number(fraction, len(covariances)), len(eligible))
    return np.random.default_rng(seed).choice(eligible, number, replace=False)


def kl_cov(covariances: Covariances, seed: int, *, fraction: float, coef: float) -> Chosen:
    """Indices of the `fraction` of the tokens with the largest covariances; ties go to the first."""
    return np.argsort(-covariances, kind="stable")[: _number(fraction, len(covariances))]


def _number(fraction: float, num_tokens: int) -> int:
    """Number of tokens in a share, at least 1, since small steps have fewer than 1 / fraction tokens."""
    return max(1, int(fraction * num_tokens)) if fraction > 0 else 0


CHOICES: dict[str, Callable[..., Chosen]] = {"clip_cov": clip_cov, "kl_cov": kl_cov}
