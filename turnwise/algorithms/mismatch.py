"""How far the sampler's log-probs are from the trainer's for the same weights and tokens, and how old the samples are.

ρ = exp(old − sampled) is the importance ratio if sampling truncates nothing, or if both are over the kept ids of each token.
With penalties, or top-p alone, part of the policy's mass is never sampled, and E[ρ] < 1 without any drift.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnwise.algorithms.kl import MAX_EXPONENT, k3
from turnwise.types import Metric, Sample


def token_mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> list[Metric]:
    """The distance of old from the sampler's log-probs, over the trained tokens of arrays [N]: mean, maximum and 99th
    percentile of
    |old − sampled|, mean of ρ, KL(sampled ‖ old) (k3) and effective sample size.

    They combine over micro-batches and optimiser steps into those of all their tokens.
    """
    difference = (old_logprobs - rollout_logprobs).detach()[mask]
    distance = difference.abs()
    ratio = torch.exp(difference.clamp(-MAX_EXPONENT, MAX_EXPONENT))
    count = len(difference)
    if not count:
        return []
    return [
        Metric("actor/train_infer_diff_token_mean", distance.mean(), weight=count),
        Metric("actor/train_infer_diff_token_max", distance.max(), "max"),
        Metric("actor/train_infer_diff_token_p99", distance, "p99"),
        Metric("actor/train_infer_ratio_token_mean", ratio.mean(), weight=count),
        Metric("actor/train_infer_kl", k3(-difference).mean(), weight=count),
        Metric("actor/train_infer_ess", ratio, "ess"),
    ]


def staleness_metrics(samples: Sequence[Sample], version: int) -> list[Metric]:
    """Policy versions between sampling and training, over trained tokens; `version` is the trainer's own.

    >>> import numpy as np
    >>> from turnwise.types import Sample, TurnSpan, VersionRun
    >>> sample = Sample(np.arange(5), np.array([False, False, True, True, True]), np.zeros(5, np.float32),
    ...                 (TurnSpan(0, 2, 5),), versions=((VersionRun(6, 1), VersionRun(7, 2)),))
    >>> [(m.name, round(m.value, 6)) for m in staleness_metrics([sample], version=7)]
    [('actor/staleness_mean', 0.333333), ('actor/staleness_max', 1.0)]
    """
    runs = [run for sample in samples for turn in sample.versions for run in turn]
    count = sum(run.num_tokens for run in runs)
    if not count:
        return []
    mean = sum((version - run.version) * run.num_tokens for run in runs) / count
    oldest = float(max(version - run.version for run in runs))
    return [Metric("actor/staleness_mean", mean, weight=count), Metric("actor/staleness_max", oldest, "max")]
