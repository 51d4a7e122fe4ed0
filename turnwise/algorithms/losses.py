"""The losses of a policy (a variant, its aggregation over tokens, a KL to the reference and an entropy bonus)
and of a critic. In all four modes of `loss_agg_mode` the loss is linear in the tokens' losses. So a mode is
one factor per token, which contains the denominator of the *whole* optimiser step, and the sum over
micro-batches and ranks doesn't depend on the split."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.algorithms.choices import CHOICES, token_covariances
from turnwise.algorithms.correction import band_mask, correction_metrics, importance_weights, token_mismatch
from turnwise.algorithms.kl import k1, k2, kl_divergence
from turnwise.algorithms.masks import mean_metrics, replace_outside
from turnwise.algorithms.ratios import Spans
from turnwise.algorithms.settings import AlgorithmSettings
from turnwise.algorithms.variants import VARIANTS, PolicyInputs, find_variant
from turnwise.protocols import Output
from turnwise.spec import LossAggMode
from turnwise.types import Batch, Denominators, Metric, ModelOutputs, TokenAnnotations


def tokens_per_sequence(mask: Tensor, sequence_id: Tensor, num_sequences: int) -> Tensor:
    """Σ m of each sequence [S], from `mask` and `sequence_id` [N].

    >>> tokens_per_sequence(torch.tensor([True, True, False, True]), torch.tensor([0, 0, 1, 1]), 3)
    tensor([2., 1., 0.])
    """
    counts = torch.zeros(num_sequences, dtype=torch.float32, device=mask.device)
    return counts.index_add(0, sequence_id, mask.to(torch.float32))


def token_factors(
    mask: Tensor,
    weights: Tensor,
    sequence_id: Tensor,
    num_sequences: int,
    denominators: Denominators,
    mode: LossAggMode,
) -> Tensor:
    """The factor of each token's loss [N]; 0 outside the mask. With weight w, mask m and, in the whole step,
    W = Σw over the tokens of the mask and B = Σw over the sequences with such a token:

    - `token-mean`: w·m / W
    - `seq-mean-token-sum`: w·m / B
    - `seq-mean-token-mean`: w·m / (B·Σm of its sequence), exact because a sequence is never split over
    micro-batches
    - `seq-mean-token-sum-norm`: w·m / (B·T_max), T_max a constant (Liu et al. 2025, "Dr. GRPO")"""
    share = replace_outside(weights.to(torch.float32), mask)
    denominator = step_denominator(denominators, mode)
    if mode == "seq-mean-token-sum-norm":
        denominator *= denominators.max_length
    if mode == "seq-mean-token-mean":
        share = share / tokens_per_sequence(mask, sequence_id, num_sequences).clamp(min=1)[sequence_id]
    return share / denominator if denominator > 0 else torch.zeros_like(share)


def step_denominator(denominators: Denominators, mode: LossAggMode) -> float:
    """The W (`token-mean`) or B (other modes) of `token_factors`, without the constant T_max."""
    return denominators.num_tokens if mode == "token-mean" else denominators.num_sequences


def aggregate(losses: Tensor, mask: Tensor, factors: Tensor) -> Tensor:
    """Σ factor·L over the mask, from three arrays [N]: this micro-batch's part of the step's loss.

    >>> from typing import get_args
    >>> losses = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
    >>> mask = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0]).bool()
    >>> step = Denominators(num_tokens=5, num_sequences=2, max_length=4)
    >>> for mode in get_args(LossAggMode):
    ...     factors = token_factors(mask, torch.ones(8), torch.tensor([0] * 4 + [1] * 4), 2, step, mode)
    ...     print(mode, round(aggregate(losses, mask, factors).item(), 6))
    token-mean 4.2
    seq-mean-token-sum 10.5
    seq-mean-token-mean 3.75
    seq-mean-token-sum-norm 2.625
    """
    return (replace_outside(losses, mask) * factors).sum()


LOSS_METRICS = ("actor/pg_loss", "actor/kl_loss", "actor/total_loss")
"""The metrics of `PolicyLoss` that are losses of a step; all others are statistics of tokens."""


class PolicyLoss:
    """pg + `kl_loss_coef`·KL(lp ‖ ref) − `entropy_loss_coef`·entropy: a `Loss` that is also `NeedsWholeStep`
    and `StreamsStep`.

    A call returns what one micro-batch adds to the loss of its optimiser step. If the batch has no
    `old_logprobs`, old is the current log-prob without its gradient. The ratio is then 1, which is exact for
    the first optimiser step of an update. Ratio and policy loss are over a token's kept ids (after top-k,
    top-p, min-p) if it has some, KL and entropy over the whole vocabulary.

    On every batch with `rollout_logprobs`, metrics compare old with the sampler's log-probs. With
    `use_rollout_log_probs` old is the sampler's own, so they compare the current log-probs with the sampler's
    instead. Raises ConfigError if a user's variant can't be loaded, or can't be called with `pg_args`."""

    outputs: frozenset[Output] = frozenset({"logprobs", "entropy"})

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings
        self.parameters = settings.variant_parameters()
        self.compute = find_variant(settings.pg_variant, self.parameters)

    @property
    def needs_advantages(self) -> bool:
        """Whether advantages of 0 give a gradient of 0. False with a KL, an entropy bonus, kimi15, kl_cov or
        a user's loss."""
        settings = self.settings
        has_own_term = settings.pg_variant not in VARIANTS or settings.pg_variant in ("kimi15", "kl_cov")
        has_kl = settings.use_kl_loss and settings.kl_loss_coef != 0
        return not (has_kl or settings.entropy_loss_coef or has_own_term)

    def prepare(self, step_batch: Batch, seed: int) -> tuple[TokenAnnotations, list[Metric]]:
        """`keep_mask`, importance weights and `selected_mask` of an optimiser step, and their metrics, from
        its batch of numpy arrays. Raises ValueError if they need `old_logprobs` and there are none."""
        batch, correction = step_batch.map(torch.as_tensor), self.settings.train_infer_correction
        keep_mask, weights = band_mask(batch, correction), importance_weights(batch, correction)
        metrics = correction_metrics(batch, keep_mask, weights)
        annotations = TokenAnnotations(
            *(None if values is None else values.numpy() for values in (keep_mask, weights))
        )
        if self.settings.pg_variant in CHOICES:
            mask = step_batch.response_mask if annotations.keep_mask is None else annotations.keep_mask
            annotations = annotations._replace(
                selected_mask=self._choose(step_batch, mask & (step_batch.weights > 0), seed)
            )
        return annotations, metrics

    def _choose(self, step_batch: Batch, mask: Any, seed: int) -> Any:
        """bool [N]: the tokens that the variant chooses among those of `mask`, bool [N]."""
        variant = self.settings.pg_variant
        if step_batch.old_logprobs is None:
            raise ValueError(
                f"pg_variant {variant} needs old_logprobs on every sample before the loss is prepared"
            )
        # Over the whole vocabulary, since the entropy is that of the whole distribution.
        full = (
            step_batch.old_logprobs if step_batch.old_full_logprobs is None else step_batch.old_full_logprobs
        )
        advantages, old = (array[mask].astype(np.float64) for array in (step_batch.advantages, full))
        selected_mask = np.zeros(len(mask), np.bool_)
        if mask.any():
            picked = CHOICES[variant](token_covariances(advantages, old), seed, **self.parameters)
            selected_mask[np.flatnonzero(mask)[picked]] = True
        return selected_mask

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Tensor, list[Metric]]:
        """`(part of the step's loss, metrics)` from tensors [N]. Entries outside the response mask have no
        effect."""
        settings, mask, loss_mask = self.settings, batch.response_mask, batch.loss_mask
        logprobs = replace_outside(outputs.logprobs.float(), mask)
        full = (
            logprobs
            if outputs.full_logprobs is None
            else replace_outside(outputs.full_logprobs.float(), mask)
        )
        inputs = PolicyInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach()
            if batch.old_logprobs is None
            else replace_outside(batch.old_logprobs, mask),
            advantages=replace_outside(batch.advantages, mask),
            spans=Spans.of(batch),
            granularity=settings.granularity,
            selected_mask=batch.selected_mask,
        )
        losses, measured = self.compute(inputs, **self.parameters)
        if batch.importance is not None:
            losses = losses * replace_outside(batch.importance, mask)
        sizes = len(batch.lengths), batch.denominators, settings.aggregation
        factors = token_factors(loss_mask, batch.weights, batch.sequence_id, *sizes)
        total = aggregate(losses, loss_mask, factors)
        parts = {"actor/pg_loss": total}
        if settings.use_kl_loss:
            reference = replace_outside(batch.ref_logprobs, mask)
            parts["actor/kl_loss"] = aggregate(
                kl_divergence(full, reference, settings.kl_loss_type), loss_mask, factors
            )
            total = total + settings.kl_loss_coef * parts["actor/kl_loss"]
        # Always measured, in nats per token: a collapsing policy shows here first.
        if outputs.entropy is not None:
            measured["actor/entropy"] = outputs.entropy.detach()
        if settings.entropy_loss_coef:
            total = total - settings.entropy_loss_coef * aggregate(
                outputs.entropy.float(), loss_mask, factors
            )
        parts["actor/total_loss"] = total
        metrics = loss_metrics(parts, batch) + token_metrics(inputs, measured, batch.weights)
        if batch.rollout_logprobs is not None:
            policy = inputs.logprobs if settings.use_rollout_log_probs else inputs.old_logprobs
            metrics += token_mismatch(policy, batch.rollout_logprobs, mask)
        return total, metrics

    def divisor(self, denominators: Denominators) -> float:
        """The denominator of the step in the aggregation mode (`step_denominator`)."""
        return step_denominator(denominators, self.settings.aggregation)

    def whole(self, metrics: Sequence[Metric], denominators: Denominators) -> list[Metric]:
        """The `metrics` of a step's parts, with the losses rescaled from means over tokens to the aggregation
        mode."""
        scale = denominators.num_tokens / self.divisor(denominators)
        return [
            metric._replace(value=metric.value * scale) if metric.name in LOSS_METRICS else metric
            for metric in metrics
        ]


def loss_metrics(parts: dict[str, Tensor], batch: Batch) -> list[Metric]:
    """One metric per entry of `parts`: its name → what the micro-batch adds to this loss of its step. A
    metric's weight is the micro-batch's share of the step's tokens. Shares sum to 1, so means are over
    *optimiser steps*, however each was split."""
    tokens = replace_outside(batch.weights, batch.loss_mask).sum()
    share = tokens / max(batch.denominators.num_tokens, torch.finfo(torch.float32).tiny)
    divisor = torch.where(share > 0, share, torch.ones_like(share))
    return [Metric(name, (part / divisor).detach(), "mean", weight=share) for name, part in parts.items()]


def token_metrics(inputs: PolicyInputs, measured: dict[str, Tensor], weights: Tensor) -> list[Metric]:
    """The policy's distance from `old_logprobs`, the ratio's mean and extremes, and `measured`; means over
    trained tokens."""
    mask, ratio = inputs.mask, inputs.ratio.detach()
    difference = (inputs.logprobs - inputs.old_logprobs).detach()
    means = {
        "actor/ratio_mean": ratio,
        "actor/approxkl": k2(difference),
        "actor/policykl": k1(-difference),
        **measured,
    }
    metrics = mean_metrics(means, mask, weights)
    count = metrics[0].weight
    # Outside the mask the ratio is exp(0) = 1; it is replaced so that it can't be the extreme.
    metrics.append(
        Metric("actor/ratio_max", replace_outside(ratio, mask, float("-inf")).max(), "max", weight=count)
    )
    metrics.append(
        Metric("actor/ratio_min", replace_outside(ratio, mask, float("inf")).min(), "min", weight=count)
    )
    return metrics


class ValueLoss:
    """A `protocols.Loss`: the mean of ½(V − R)² over the states before trained tokens, or, with
    `gae_granularity: turn`, before turns. R is the return. With `value_clip` c the loss is ½·max((V − R)²,
    (clip(V, V_old − c, V_old + c) − R)²), where V_old is from before the update: moving a value by more than
    c gains nothing (OpenAI Baselines, ppo2)."""

    outputs: frozenset[Output] = frozenset({"values"})

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.clip = settings.value_clip
        self.is_by_turn = settings.gae_granularity == "turn"

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Tensor, list[Metric]]:
        """`(part of the step's loss, metrics)` from tensors [N]. Entries of other states have no effect."""
        mask = first_tokens(batch) if self.is_by_turn else batch.response_mask
        num_states = batch.denominators.num_turns if self.is_by_turn else batch.denominators.num_tokens
        values, old, returns = (
            replace_outside(x, mask) for x in (outputs.values.float(), batch.values, batch.returns)
        )
        errors = (values - returns).square()
        losses = errors
        measured = {"critic/value": old, "critic/vpred": values, "critic/error": errors}
        if self.clip is not None:
            clipped = (values.clamp(old - self.clip, old + self.clip) - returns).square()
            losses = torch.maximum(errors, clipped)
            measured["critic/clipfrac"] = clipped > errors
        share = replace_outside(batch.weights, mask)
        factors = share / num_states if num_states > 0 else torch.zeros_like(share)
        total = 0.5 * aggregate(losses, mask, factors)
        return total, loss_metrics({"critic/loss": total}, batch) + mean_metrics(
            measured, mask, batch.weights
        )


def first_tokens(batch: Batch) -> Tensor:
    """bool [N]: the first trained token of each turn, even if tokens in the turn's middle aren't trained
    on."""
    trained = batch.response_mask.nonzero().squeeze(-1)
    turn = Spans.of(batch).turn_id[trained]
    is_first = torch.ones_like(trained, dtype=torch.bool)
    is_first[1:] = turn[1:] != turn[:-1]
    return torch.zeros_like(batch.response_mask).index_put((trained,), is_first)
