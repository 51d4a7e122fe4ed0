"""Corrects the loss for tokens that were sampled from another distribution than the trainer's (`train_infer_correction`).

ρ = exp(old − sampled) is known before an optimiser step begins, and so are its weights and masks. They don't depend on the cut
into micro-batches, and the step's denominators count the tokens that the masks leave.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.algorithms.kl import MAX_EXPONENT
from turnwise.algorithms.masks import masked_mean, replace_outside
from turnwise.algorithms.ratios import Spans
from turnwise.algorithms.settings import Correction
from turnwise.spec import Granularity
from turnwise.types import Batch, Metric


def importance_ratio(batch: Batch, granularity: Granularity) -> Tensor:
    """ρ [N] of a batch of tensors: exp(old − sampled) of each token, or of its turn's mean (`segment`), its sequence's mean
    (`geometric`) or its sequence's sum. Exponents are clamped to ±20. Entries outside the response mask are meaningless.

    Raises:
        ValueError: the forward pass for the old log-probs hasn't run.
    """
    if batch.old_logprobs is None:
        raise ValueError("train_infer_correction needs old_logprobs on every sample before the loss is prepared")
    exponent = Spans.of(batch).over(batch.old_logprobs - batch.rollout_logprobs, granularity)
    return torch.exp(exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT))


def kept_tokens(batch: Batch, correction: Correction) -> Tensor | None:
    """bool [N]: the trained tokens with low ≤ ρ ≤ high in every filter; None without filters.

    A filter on tokens is IcePop; a filter on sequences is masked importance sampling.
    """
    if not correction.filters:
        return None
    kept = batch.response_mask
    for band in correction.filters:
        ratio = importance_ratio(batch, band.granularity)
        kept = kept & (ratio >= band.low) & (ratio <= band.high)
    return kept


def importance_weights(batch: Batch, correction: Correction) -> Tensor | None:
    """min(ρ, cap) [N], constants of the loss, 0 outside the response mask; None without weights.

    Truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training").
    """
    if correction.weights is None:
        return None
    ratio = importance_ratio(batch, correction.weights.granularity).clamp(max=correction.weights.cap)
    return replace_outside(ratio, batch.response_mask).detach()


def correction_metrics(batch: Batch, kept: Tensor | None, weights: Tensor | None) -> list[Metric]:
    """The share of trained tokens that the filters remove, and the mean weight of the rest."""
    mask, metrics = batch.response_mask, []
    if kept is not None:
        count = replace_outside(batch.weights, mask).sum()
        share = masked_mean((~kept).float(), mask, batch.weights)
        metrics.append(Metric("actor/train_infer_masked_frac", share, weight=count))
        mask = kept
    if weights is not None:
        count = replace_outside(batch.weights, mask).sum()
        metrics.append(Metric("actor/train_infer_weight_mean", masked_mean(weights, mask, batch.weights), weight=count))
    return metrics
