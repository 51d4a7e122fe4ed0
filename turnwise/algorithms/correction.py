"""Measures how sampler and trainer differ for the same weights and tokens, and corrects the loss
(`train_infer_correction`).

ρ = exp(old − sampled) is the importance ratio if sampling truncates nothing, or if both log-probs are
normalised over each token's kept ids (the candidates that top-k, top-p and min-p left). If sampling truncates
and the server returns no kept ids (see `SamplingParams.keeps_ids`), part of the policy's mass is never
sampled, and E[ρ] < 1 even if both policies are equal.

ρ, its weights and its masks are computed before an optimiser step begins. So they don't depend on how the
step is split into micro-batches, and the step's denominators count only the tokens that the masks keep."""

from collections.abc import Sequence

import torch
from torch import Tensor

from turnwise.algorithms.kl import MAX_EXPONENT, k3
from turnwise.algorithms.masks import mean_metrics, replace_outside
from turnwise.algorithms.ratios import Spans
from turnwise.algorithms.settings import Correction
from turnwise.spec import Granularity
from turnwise.types import Batch, Metric, Sample


def importance_ratio(batch: Batch, granularity: Granularity) -> Tensor:
    """ρ [N] of a batch of tensors: exp(old − sampled), where the exponent is the token's own, or its mean
    over the turn (`segment`) or sequence (`geometric`), or its sum over the sequence (`sequence`), clamped to
    ±20. Entries outside the response mask are meaningless. Raises ValueError if the forward pass for the old
    log-probs hasn't run."""
    if batch.old_logprobs is None:
        raise ValueError(
            "train_infer_correction needs old_logprobs on every sample before the loss is prepared"
        )
    difference = batch.old_logprobs - batch.rollout_logprobs
    exponent = Spans.of(batch).over(difference, granularity)
    bounded = exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return torch.exp(bounded)


def band_mask(batch: Batch, correction: Correction) -> Tensor | None:
    """bool [N]: the trained tokens with low ≤ ρ ≤ high in every filter; None without filters. With
    granularity `token` a filter is IcePop; with `sequence` or `geometric` it is masked importance
    sampling."""
    if not correction.filters:
        return None
    keep_mask = batch.response_mask
    for band in correction.filters:
        ratio = importance_ratio(batch, band.granularity)
        keep_mask = keep_mask & (ratio >= band.low) & (ratio <= band.high)
    return keep_mask


def importance_weights(batch: Batch, correction: Correction) -> Tensor | None:
    """min(ρ, cap) [N] without a gradient, 0 outside the response mask; None without `weights`. This is
    truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training")."""
    if correction.weights is None:
        return None
    ratio = importance_ratio(batch, correction.weights.granularity)
    truncated = ratio.clamp(max=correction.weights.cap)
    return replace_outside(truncated, batch.response_mask).detach()


def correction_metrics(batch: Batch, keep_mask: Tensor | None, weights: Tensor | None) -> list[Metric]:
    """The share of trained tokens that the filters remove, and the mean importance weight of the rest."""
    mask = batch.response_mask
    metrics: list[Metric] = []
    if keep_mask is not None:
        measured = {"actor/train_infer_masked_frac": ~keep_mask}
        metrics += mean_metrics(measured, mask, batch.weights)
        mask = keep_mask
    if weights is not None:
        measured = {"actor/train_infer_weight_mean": weights}
        metrics += mean_metrics(measured, mask, batch.weights)
    return metrics


def token_mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> list[Metric]:
    """How far the old log-probs [N] are from the sampler's, over the tokens of `mask`: mean, maximum and 99th
    percentile of |old − sampled|, mean of ρ, KL(sampled ‖ old) (k3) and effective sample size. Combined over
    micro-batches and optimiser steps, they are the statistics of all tokens."""
    difference = (old_logprobs - rollout_logprobs).detach()[mask]
    distance = difference.abs()
    bounded = difference.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    ratio = torch.exp(bounded)
    kl = k3(-difference)
    count = len(difference)
    if not count:
        return []
    return [
        Metric("actor/train_infer_diff_token_mean", distance.mean(), weight=count),
        Metric("actor/train_infer_diff_token_max", distance.max(), "max"),
        Metric("actor/train_infer_diff_token_p99", distance, "p99"),
        Metric("actor/train_infer_ratio_token_mean", ratio.mean(), weight=count),
        Metric("actor/train_infer_kl", kl.mean(), weight=count),
        Metric("actor/train_infer_ess", ratio, "ess"),
    ]


def staleness_metrics(samples: Sequence[Sample], version: int) -> list[Metric]:
    """Mean and maximum age of the trained tokens: the trainer's `version` minus the policy version that
    sampled the token.

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
    total = sum((version - run.version) * run.num_tokens for run in runs)
    oldest = max(version - run.version for run in runs)
    return [
        Metric("actor/staleness_mean", total / count, weight=count),
        Metric("actor/staleness_max", float(oldest), "max"),
    ]
