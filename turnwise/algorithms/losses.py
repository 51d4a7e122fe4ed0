"""The loss of a policy: a variant, its aggregation over tokens, a KL to the reference and an entropy bonus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.algorithms.aggregation import aggregate, step_denominator, token_factors
from turnwise.algorithms.choices import CHOICES, token_covariances
from turnwise.algorithms.correction import correction_metrics, importance_weights, kept_tokens
from turnwise.algorithms.kl import k1, k2, kl_divergence
from turnwise.algorithms.masks import masked_mean, replace_outside
from turnwise.algorithms.mismatch import token_mismatch
from turnwise.algorithms.ratios import Spans
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.variants import VARIANTS, PolicyInputs, find_variant
from turnwise.protocols import Output
from turnwise.types import Batch, Denominators, Metric, ModelOutputs, TokenAnnotations

LOSS_METRICS = ("actor/pg_loss", "actor/kl_loss", "actor/total_loss")
"""The metrics of `PolicyLoss` that are divided like its loss; all others are means over tokens, or extremes."""


class PolicyLoss:
    """pg + `kl_loss_coef`·KL(lp, ref) − `entropy_loss_coef`·entropy: a `Loss` that `NeedsWholeStep` and `StreamsStep`.

    Returns a micro-batch's part of its optimiser step's loss: the parts of a step add up. Without `old_logprobs` on the
    batch, old is the current log-prob without its gradient: a ratio of 1, right only while the policy that sampled is the
    one being trained. Ratio and policy loss are over the kept ids of each token that has some, KL and entropy over the whole
    vocabulary. The mismatch between sampler and trainer is measured on every batch that has `rollout_logprobs`; with
    `use_rollout_log_probs`, where old is the sampler's own, it is measured from the current log-probs, which earlier optimiser
    steps on the same samples have already changed.

    Raises:
        ConfigError: a name or parameter that doesn't exist, or settings that contradict each other.
    """

    outputs: frozenset[Output]

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.parameters = settings.variant_parameters()
        self.variant = settings.pg_variant
        self.granularity = settings.granularity
        self.compute = find_variant(self.variant, self.parameters)
        self.correction = settings.train_infer_correction
        self.mode = settings.aggregation
        self.kl_type = settings.kl_loss_type
        self.kl_coef = settings.kl_loss_coef if settings.use_kl_loss else None
        self.entropy_coef = settings.entropy_loss_coef
        self.uses_rollout_logprobs = settings.use_rollout_log_probs
        self.outputs = frozenset({"logprobs", "entropy"})

    @property
    def needs_advantages(self) -> bool:
        """Whether only advantages move the policy: no KL, no entropy bonus, no term of the variant's own."""
        has_own_term = self.variant not in VARIANTS or self.variant in ("kimi15", "kl_cov")
        return not (self.kl_coef or self.entropy_coef or has_own_term)

    def prepare(self, step_batch: Batch, seed: int) -> tuple[TokenAnnotations, list[Metric]]:
        """Importance weights, masks and chosen tokens of an optimiser step, from its batch of numpy arrays.

        Raises:
            ValueError: they need `old_logprobs`, which are missing.
        """
        batch = step_batch.map(torch.as_tensor)
        kept, weights = kept_tokens(batch, self.correction), importance_weights(batch, self.correction)
        metrics = correction_metrics(batch, kept, weights)
        annotations = TokenAnnotations(None if kept is None else kept.numpy(), None if weights is None else weights.numpy())
        if self.variant in CHOICES:
            counted = step_batch.response_mask if annotations.keep_mask is None else annotations.keep_mask
            annotations = annotations._replace(selected_mask=self._choose(step_batch, counted & (step_batch.weights > 0), seed))
        return annotations, metrics

    def _choose(self, step_batch: Batch, counted: Any, seed: int) -> Any:
        """bool [N]: the tokens among `counted` [N] that the variant chooses."""
        if step_batch.old_logprobs is None:
            raise ValueError(f"pg_variant {self.variant} needs old_logprobs on every sample before the loss is prepared")
        # Over the whole vocabulary: they decide about the entropy of that distribution.
        full = step_batch.old_logprobs if step_batch.old_full_logprobs is None else step_batch.old_full_logprobs
        advantages, old = (array[counted].astype(np.float64) for array in (step_batch.advantages, full))
        chosen = np.zeros(len(counted), np.bool_)
        if counted.any():
            picked = CHOICES[self.variant](token_covariances(advantages, old), seed, **self.parameters)
            chosen[np.flatnonzero(counted)[picked]] = True
        return chosen

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Tensor, list[Metric]]:
        """`(part of the step's loss, metrics)` from tensors [N]. Entries outside the response mask are never read."""
        mask, counted = batch.response_mask, batch.loss_mask
        logprobs = replace_outside(outputs.logprobs.float(), mask)
        full = logprobs if outputs.full_logprobs is None else replace_outside(outputs.full_logprobs.float(), mask)
        inputs = PolicyInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if batch.old_logprobs is None else replace_outside(batch.old_logprobs, mask),
            advantages=replace_outside(batch.advantages, mask),
            spans=Spans.of(batch),
            granularity=self.granularity,
            selected_mask=batch.selected_mask,
        )
        losses, measured = self.compute(inputs, **self.parameters)
        if batch.importance is not None:
            losses = losses * replace_outside(batch.importance, mask)
        factors = token_factors(counted, batch.weights, batch.sequence_id, len(batch.lengths), batch.denominators, self.mode)
        total = aggregate(losses, counted, factors)
        parts = {"actor/pg_loss": total}
        if self.kl_coef is not None:  # 0 measures it
            reference = replace_outside(batch.ref_logprobs, mask)
            parts["actor/kl_loss"] = aggregate(kl_divergence(full, reference, self.kl_type), counted, factors)
            total = total + self.kl_coef * parts["actor/kl_loss"]
        # Always measured, in nats a token: a policy that collapses shows it here first.
        if outputs.entropy is not None:
            measured["actor/entropy"] = outputs.entropy.detach()
        if self.entropy_coef:
            total = total - self.entropy_coef * aggregate(outputs.entropy.float(), counted, factors)
        parts["actor/total_loss"] = total
        metrics = loss_metrics(parts, batch) + token_metrics(inputs, measured, batch.weights)
        if batch.rollout_logprobs is not None:
            policy = inputs.logprobs if self.uses_rollout_logprobs else inputs.old_logprobs
            metrics += token_mismatch(policy, batch.rollout_logprobs, mask)
        return total, metrics

    def divisor(self, denominators: Denominators) -> float:
        """The step's denominator of the aggregation."""
        return step_denominator(denominators, self.mode)

    def whole(self, metrics: Sequence[Metric], denominators: Denominators) -> list[Metric]:
        """Converts losses of parts, which are per token, to the step's own aggregation."""
        scale = denominators.num_tokens / self.divisor(denominators)
        return [metric._replace(value=metric.value * scale) if metric.name in LOSS_METRICS else metric for metric in metrics]


def loss_metrics(parts: dict[str, Tensor], batch: Batch) -> list[Metric]:
    """Parts of a step's losses as metrics whose mean is the mean over *optimiser steps*, however each was cut.

    Each part is weighed by the micro-batch's share of the step's counted tokens; the shares of a step add up to 1.
    """
    tokens = replace_outside(batch.weights, batch.loss_mask).sum()
    share = tokens / max(batch.denominators.num_tokens, torch.finfo(torch.float32).tiny)
    divisor = torch.where(share > 0, share, torch.ones_like(share))
    return [Metric(name, (part / divisor).detach(), "mean", weight=share) for name, part in parts.items()]


def token_metrics(inputs: PolicyInputs, measured: dict[str, Tensor], weights: Tensor) -> list[Metric]:
    """The policy's distance from `old` and the variant's quantities [N]: means over trained tokens, whatever the aggregation of
    the loss, and the extremes of the ratio."""
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
