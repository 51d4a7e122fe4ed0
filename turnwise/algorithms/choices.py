"""Chooses the tokens of an optimiser step that `clip_cov` leaves out of the loss, or to which `kl_cov` adds a
penalty. Cov_t = (A_t − Ā)·(old_t − mean old) is a token's share of the covariance of advantage and log-prob.
To first order, the entropy falls in proportion to this covariance (Cui et al. 2025, arXiv:2505.22617, section
4). Means are over all tokens that the step's loss counts."""

from collections.abc import Callable

import numpy as np

from turnwise.algorithms.response_tokens import Array, Index


def token_covariances(advantages: Array, old_logprobs: Array) -> Array:
    """(A − Ā)(old − mean old) of `advantages` and `old_logprobs` [R].

    >>> token_covariances(np.array([1.0, -1.0]), np.array([-1.0, -3.0]))
    array([1., 1.])
    """
    advantage_deviations = advantages - advantages.mean()
    logprob_deviations = old_logprobs - old_logprobs.mean()
    return advantage_deviations * logprob_deviations


def clip_cov(
    covariances: Array,
    seed: int,
    *,
    fraction: float,
    covariance_low: float,
    covariance_high: float,
    clip_low: float,
    clip_high: float,
) -> Index:
    """Indices drawn among tokens with a covariance in [covariance_low, covariance_high]: `fraction` of all
    tokens, or all such tokens if they are fewer. The clip bounds are for `variants.clip_cov` alone."""
    is_in_band = (covariances >= covariance_low) & (covariances <= covariance_high)
    eligible = np.flatnonzero(is_in_band)
    number = min(_number(fraction, len(covariances)), len(eligible))
    generator = np.random.default_rng(seed)
    return generator.choice(eligible, number, replace=False)


def kl_cov(covariances: Array, seed: int, *, fraction: float, coef: float) -> Index:
    """Indices of the `fraction` of the tokens with the largest covariances; among equal ones, earlier tokens
    come first. The choice doesn't depend on `seed`, and `coef` is for `variants.kl_cov` alone."""
    number = _number(fraction, len(covariances))
    from_largest = np.argsort(-covariances, kind="stable")
    return from_largest[:number]


def _number(fraction: float, num_tokens: int) -> int:
    """`fraction` of the tokens, but at least 1, since a step may have fewer than 1 / fraction tokens; 0 for a
    fraction of 0."""
    if fraction <= 0:
        return 0
    return max(1, int(fraction * num_tokens))


CHOICES: dict[str, Callable[..., Index]] = {"clip_cov": clip_cov, "kl_cov": kl_cov}
