"""The KL between the policy and a reference as a penalty on rewards (Ziegler et al. 2019, arXiv:1909.08593, eq. 2)."""

from __future__ import annotations

import numpy as np
import torch

from turnwise.algorithms.controllers import KLController
from turnwise.algorithms.kl import kl_divergence
from turnwise.algorithms.response_tokens import Array, ResponseTokens
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.types import Metric


def penalize_kl(tokens: ResponseTokens, settings: AlgorithmSettings, controller: KLController) -> tuple[Array, list[Metric]]:
    """β·KL_t(old, ref) of each token [R], to be subtracted from its reward; 0 without `add_token_level_kl`. Steers β.

    The KL is logged only if both log-probs exist: a number made from zeros would look like a KL.

    Raises:
        ValueError: the penalty is on and a forward pass that it needs hasn't run.
    """
    full = [sample.old_logprobs if sample.old_full_logprobs is None else sample.old_full_logprobs for sample in tokens.samples]
    old = tokens.gather(full)
    ref = tokens.gather([sample.ref_logprobs for sample in tokens.samples])
    if old is None or ref is None:
        if settings.add_token_level_kl:
            raise ValueError("add_token_level_kl needs old_logprobs and ref_logprobs on every sample before credit")
        return np.zeros(len(tokens.position)), []
    kl = kl_divergence(torch.from_numpy(old), torch.from_numpy(ref), settings.kl_penalty).numpy()
    sums, lengths = tokens.totals(kl)[tokens.is_trained], tokens.lengths[tokens.is_trained]
    if not len(sums):
        return np.zeros_like(kl), []
    kl_mean = float((sums / lengths).mean())
    metrics = [Metric("critic/kl", kl_mean, weight=len(sums)), Metric("critic/kl_sum", float(sums.mean()), weight=len(sums))]
    if not settings.add_token_level_kl:
        return np.zeros_like(kl), metrics
    metrics.append(Metric("critic/kl_coef", controller.coef, "last"))
    penalties = controller.coef * kl
    controller.update(kl_mean, len(tokens.trajectories))
    return penalties, metrics
