"""How far the sampler's log-probs are from the trainer's for the same weights and tokens, and how old the samples are.

ρ = exp(old − sampled) is the importance ratio where nothing was truncated while sampling; with top-k, top-p or penalties
on, part of the policy's mass is never sampled and E[ρ] < 1 without any drift.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnwise.algorithms.kl import MAX_EXPONENT, k3
from turnwise.algorithms.masks import masked_mean, replace_outside
from turnwise.types import Metric, Sample


def token_mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> list[Metric]:
    """Mean and maximum of |old − sampled|, mean of ρ and KL(sampled ‖ old) (k3) over the trained tokens of arrays [N].

    These combine over micro-batches, so a loss may emit them too.
    """
    difference = replace_outside(old_logprobs - rollout_logprobs, mask).detach()
    ratio = torch.exp(difference.clamp(-MAX_EXPONENT, MAX_EXPONENT))
    count = mask.sum()
    return [
        Metric("actor/train_infer_diff_token_mean", masked_mean(difference.abs(), mask), weight=count),
        Metric("actor/train_infer_diff_token_max", difference.abs().max(), "max", weight=count),
        Metric("actor/train_infer_ratio_token_mean", masked_mean(ratio, mask), weight=count),
        Metric("actor/train_infer_kl", masked_mean(k3(-difference), mask), weight=count),
    ]


def mismatch_metrics(samples: Sequence[Sample]) -> list[Metric]:
    """`token_mismatch` over samples, with the 99th percentile of |old − sampled| and the effective sample size.

    The effective sample size is (Σρ)² / (n·Σρ²), the share of the n trained tokens that equally weighted ones would need.
    Samples without old log-probs are left out; nothing is returned where none has any.
    """
    pairs = [
        (s.old_logprobs[s.response_mask], s.rollout_logprobs[s.response_mask]) for s in samples if s.old_logprobs is not None
    ]
    if not any(len(old) for old, _ in pairs):
        return []
    old, sampled = (torch.from_numpy(np.concatenate(arrays).astype(np.float64)) for arrays in zip(*pairs, strict=True))
    ratio = torch.exp((old - sampled).clamp(-MAX_EXPONENT, MAX_EXPONENT))
    effective = ratio.sum().square() / (len(ratio) * ratio.square().sum())
    percentile = float(np.percentile(np.abs((old - sampled).numpy()), 99))
    return [
        *token_mismatch(old, sampled, torch.ones_like(old, dtype=torch.bool)),
        Metric("actor/train_infer_diff_token_p99", percentile, "last"),
        Metric("actor/train_infer_ess", float(effective), "last"),
    ]


def staleness_metrics(samples: Sequence[Sample], version: int) -> list[Metric]:
    """Policy versions between sampling and training, over trained tokens; `version` is the trainer's own.

    >>> from turnwise.types import TurnSpan, VersionRun
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
