"""The loss of a policy: a variant, its aggregation over tokens, a KL to the reference and an entropy bonus."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.algorithms.aggregation import aggregate, check_mode, token_factors
from turnwise.algorithms.kl import check_loss_type, k1, k2, kl_divergence
from turnwise.algorithms.masks import masked_mean, replace_outside
from turnwise.algorithms.mismatch import token_mismatch
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.variants import VARIANTS, PolicyInputs
from turnwise.errors import NotAvailableError
from turnwise.protocols import Output
from turnwise.types import Batch, Metric, ModelOutputs


class PolicyLoss:
    """pg + `kl_loss_coef`·KL(lp, ref) − `entropy_loss_coef`·entropy, a `protocols.Loss`.

    Returns a micro-batch's part of its optimiser step's loss: the parts of a step add up. Without `old_logprobs` on the
    batch, old is the current log-prob without its gradient: a ratio of 1, right only while the policy that sampled is the
    one being trained. The mismatch between sampler and trainer is measured on every batch that has `rollout_logprobs`; where
    old is the sampler's own (`use_rollout_log_probs`) it is measured from the current log-probs instead, which differ from the
    policy's at the start of the update by what earlier optimiser steps on the same samples have changed.

    Raises:
        ConfigError: a name or parameter that doesn't exist, or an estimator of the KL that can't be a loss.
        NotAvailableError: a variant, or a correction, that isn't in this version.
    """

    outputs: frozenset[Output]

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.parameters = settings.variant_parameters()
        if settings.pg_variant not in VARIANTS:
            raise NotAvailableError(
                f"pg_variant {settings.pg_variant!r} isn't in this version; available: {', '.join(VARIANTS)}."
            )
        if settings.train_infer_correction is not None:
            raise NotAvailableError("train_infer_correction isn't in this version; remove it (the mismatch is logged anyway).")
        if settings.ratio_type not in (None, "token"):
            raise NotAvailableError(f"ratio_type {settings.ratio_type!r} isn't in this version; use 'token'.")
        self.variant = settings.pg_variant
        self.mode = check_mode(settings.aggregation)
        self.kl_type = check_loss_type(settings.kl_loss_type)
        self.kl_coef = settings.kl_loss_coef if settings.use_kl_loss else 0.0
        self.entropy_coef = settings.entropy_loss_coef
        self.uses_rollout_logprobs = settings.use_rollout_log_probs
        self.outputs = frozenset({"logprobs", "entropy"})

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Tensor, list[Metric]]:
        """`(part of the step's loss, metrics)` from tensors [N]. What lies outside the response mask is never read."""
        mask = batch.response_mask
        logprobs = replace_outside(outputs.logprobs.float(), mask)
        inputs = PolicyInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if batch.old_logprobs is None else replace_outside(batch.old_logprobs, mask),
            advantages=replace_outside(batch.advantages, mask),
            mask=mask,
            sequence_id=batch.sequence_id,
            num_sequences=len(batch.lengths),
        )
        losses, measured = VARIANTS[self.variant](inputs, **self.parameters)
        factors = token_factors(mask, batch.weights, batch.sequence_id, len(batch.lengths), batch.denominators, self.mode)
        total = aggregate(losses, mask, factors)
        parts = {"actor/pg_loss": total}
        if self.kl_coef:
            reference = replace_outside(batch.ref_logprobs, mask)
            parts["actor/kl_loss"] = aggregate(kl_divergence(logprobs, reference, self.kl_type), mask, factors)
            total = total + self.kl_coef * parts["actor/kl_loss"]
        # Always measured, in nats a token: a policy that collapses shows it here first.
        if outputs.entropy is not None:
            measured["actor/entropy"] = outputs.entropy.detach()
        if self.entropy_coef:
            total = total - self.entropy_coef * aggregate(outputs.entropy.float(), mask, factors)
        parts["actor/total_loss"] = total
        metrics = loss_metrics(parts, batch) + token_metrics(inputs, measured, batch.weights)
        if batch.rollout_logprobs is not None:
            policy = inputs.logprobs if self.uses_rollout_logprobs else inputs.old_logprobs
            metrics += token_mismatch(policy, batch.rollout_logprobs, mask)
        return total, metrics


def loss_metrics(parts: dict[str, Tensor], batch: Batch) -> list[Metric]:
    """Parts of a step's losses as metrics whose mean is the mean over *optimiser steps*, however each was cut.

    Each part is weighed by the micro-batch's share of the step's trained tokens; the shares of a step add up to 1.
    """
    tokens = replace_outside(batch.weights, batch.response_mask).sum()
    share = tokens / max(batch.denominators.num_tokens, torch.finfo(torch.float32).tiny)
    divisor = torch.where(share > 0, share, torch.ones_like(share))
    return [Metric(name, (part / divisor).detach(), "mean", weight=share) for name, part in parts.items()]


def token_metrics(inputs: PolicyInputs, measured: dict[str, Tensor], weights: Tensor) -> list[Metric]:
    """How far the policy has moved since `old` and what else was measured [N]: means over trained tokens, whatever the
    aggregation of the loss, and the extremes of the ratio."""
    mask, ratio = inputs.mask, inputs.ratio.detach()
    difference = (inputs.logprobs - inputs.old_logprobs).detach()
    count = replace_outside(weights, mask).sum()
    means: dict[str, Any] = {
        "actor/ratio_mean": ratio,
        "actor/approxkl": k2(difference),
        "actor/policykl": k1(-difference),
        **measured,
    }
    metrics = [Metric(name, masked_mean(x.float(), mask, weights), weight=count) for name, x in means.items()]
    # Outside the mask the ratio is exp(0) = 1: filled so that it can't be the extreme.
    metrics.append(Metric("actor/ratio_max", replace_outside(ratio, mask, float("-inf")).max(), "max", weight=count))
    metrics.append(Metric("actor/ratio_min", replace_outside(ratio, mask, float("inf")).min(), "min", weight=count))
    return metrics
