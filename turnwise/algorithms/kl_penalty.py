"""The KL between the policy and a reference as a penalty on rewards (Ziegler et al. 2019, arXiv:1909.08593, eq. 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.algorithms.controllers import KLController
from turnwise.algorithms.kl import kl_divergence
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.types import Metric, Sample, Trajectory

TokenPenalties = list[list[NDArray[np.float64]]]
"""`[trajectory][sample]` → [N], 0 outside the response mask."""


def penalize_kl(
    trajectories: Sequence[Trajectory], settings: AlgorithmSettings, controller: KLController
) -> tuple[TokenPenalties, list[Metric]]:
    """β·KL_t(old, ref) of each token, to be subtracted from its reward; 0 without `add_token_level_kl`. Steers β.

    The KL is logged wherever both log-probs are there, and nowhere else: a number made from zeros would look like a KL.

    Raises:
        ValueError: the penalty is on and a forward pass that it needs hasn't run.
    """
    coef = controller.coef if settings.add_token_level_kl else 0.0
    penalties: TokenPenalties = []
    sums, means = [], []
    for trajectory in trajectories:
        tokens = [_token_kl(sample, settings.kl_penalty) for sample in trajectory.samples]
        if settings.add_token_level_kl and any(kl is None for kl in tokens):
            raise ValueError("add_token_level_kl needs old_logprobs and ref_logprobs on every sample before credit")
        known = [(kl, sample) for kl, sample in zip(tokens, trajectory.samples, strict=True) if kl is not None]
        if num_tokens := sum(sample.num_trained for _, sample in known):
            sums.append(float(sum(kl.sum() for kl, _ in known)))
            means.append(sums[-1] / num_tokens)
        penalties.append(
            [np.zeros(s.num_tokens) if kl is None else coef * kl for kl, s in zip(tokens, trajectory.samples, strict=True)]
        )
    if not means:
        return penalties, []
    kl_mean = float(np.mean(means))
    metrics = [Metric("critic/kl", kl_mean, weight=len(means)), Metric("critic/kl_sum", float(np.mean(sums)), weight=len(sums))]
    if settings.add_token_level_kl:
        metrics.append(Metric("critic/kl_coef", controller.coef, "last"))
        controller.update(kl_mean, len(trajectories))
    return penalties, metrics


def _token_kl(sample: Sample, estimator: str) -> NDArray[np.float64] | None:
    """KL(old, ref) of the trained tokens of a sample [N], 0 elsewhere; None where a forward pass is missing."""
    result, mask = np.zeros(sample.num_tokens), sample.response_mask
    if not sample.num_trained:
        return result
    if sample.old_logprobs is None or sample.ref_logprobs is None:
        return None
    old, ref = (torch.from_numpy(array[mask].astype(np.float64)) for array in (sample.old_logprobs, sample.ref_logprobs))
    result[mask] = kl_divergence(old, ref, estimator).numpy()
    return result
