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
from turnwise.algorithms.masks import masked_mean, mean_metrics, replace_outside
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
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """The factor of each token's loss [N]; 0 outside the mask. With weight w, mask m and, in the whole step,
    W = Σw over the tokens of the mask and B = Σw over the episodes with such a token:

    - `token-mean`: w·m / W
    - `seq-mean-token-sum`: w·m / B
    - `seq-mean-token-mean`: w·m / (B·Σm of its episode)
    - `seq-mean-token-sum-norm`: w·m / (B·T_max), T_max a constant (Liu et al. 2025, "Dr. GRPO")

    An episode is one sequence, which is never split over micro-batches, unless it was cut into several;
    `episode_tokens` [N] is then Σm of each token's episode."""
    share = replace_outside(weights.to(torch.float32), mask)
    denominator = step_denominator(denominators, mode)
    if mode == "seq-mean-token-sum-norm":
        denominator *= denominators.max_length
    if mode == "seq-mean-token-mean":
        if episode_tokens is None:
            episode_tokens = tokens_per_sequence(mask, sequence_id, num_sequences)[sequence_id]
        share = share / episode_tokens.clamp(min=1)
    return _divided(share, denominator)


def _divided(share: Tensor, denominator: float) -> Tensor:
    """`share` / `denominator`; 0 if the step counts nothing."""
    if denominator > 0:
        return share / denominator
    return torch.zeros_like(share)


def step_denominator(denominators: Denominators, mode: LossAggMode) -> float:
    """The W (`token-mean`) or B (other modes) of `token_factors`, without the constant T_max."""
    if mode == "token-mean":
        return denominators.num_tokens
    return denominators.num_sequences


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


def entropy_share(batch: Batch, target: float) -> float:
    """The share of the entropy bonus in an optimiser step: 1 − H / `target`, at least 0. H is the policy's
    entropy before the step, as the weighted mean of −log-prob over the trained tokens, which were sampled
    from it. Without old log-probs the sampler's are taken."""
    known = (batch.old_full_logprobs, batch.old_logprobs, batch.rollout_logprobs)
    logprobs = next(values for values in known if values is not None)
    entropy = -masked_mean(logprobs, batch.response_mask, batch.weights).item()
    return max(0.0, 1.0 - entropy / target)


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
        is_users = settings.pg_variant not in VARIANTS
        has_own_term = is_users or settings.pg_variant in ("kimi15", "kl_cov")
        has_kl = settings.use_kl_loss and settings.kl_loss_coef != 0
        return not (has_kl or settings.entropy_loss_coef or has_own_term)

    def prepare(self, step_batch: Batch, seed: int) -> tuple[TokenAnnotations, list[Metric]]:
        """`keep_mask`, importance weights, `selected_mask` and the share of the entropy bonus of an optimiser
        step, and their metrics, from its batch of numpy arrays. Raises ValueError if they need
        `old_logprobs` and there are none."""
        batch = step_batch.map(torch.as_tensor)
        correction = self.settings.train_infer_correction
        keep_mask = band_mask(batch, correction)
        weights = importance_weights(batch, correction)
        metrics = correction_metrics(batch, keep_mask, weights)
        annotations = TokenAnnotations(
            keep_mask=None if keep_mask is None else keep_mask.numpy(),
            importance=None if weights is None else weights.numpy(),
        )
        if self.settings.target_entropy is not None:
            share = entropy_share(batch, self.settings.target_entropy)
            metrics.append(Metric("actor/entropy_share", share))
            shares = np.full(step_batch.num_tokens, share, np.float32)
            annotations = annotations._replace(entropy_share=shares)
        if self.settings.pg_variant in CHOICES:
            mask = step_batch.response_mask if annotations.keep_mask is None else annotations.keep_mask
            is_counted = mask & (step_batch.weights > 0)
            selected_mask = self._choose(step_batch, is_counted, seed)
            annotations = annotations._replace(selected_mask=selected_mask)
        return annotations, metrics

    def _choose(self, step_batch: Batch, mask: Any, seed: int) -> Any:
        """bool [N]: the tokens that the variant chooses among those of `mask`, bool [N]."""
        variant = self.settings.pg_variant
        if step_batch.old_logprobs is None:
            raise ValueError(
                f"pg_variant {variant} needs old_logprobs on every sample before the loss is prepared"
            )
        # Over the whole vocabulary, since the entropy is that of the whole distribution.
        old_logprobs = step_batch.old_full_logprobs
        if old_logprobs is None:
            old_logprobs = step_batch.old_logprobs
        selected_mask = np.zeros(len(mask), np.bool_)
        if not mask.any():
            return selected_mask
        advantages = step_batch.advantages[mask].astype(np.float64)
        old = old_logprobs[mask].astype(np.float64)
        covariances = token_covariances(advantages, old)
        picked = CHOICES[variant](covariances, seed, **self.parameters)
        positions = np.flatnonzero(mask)[picked]
        selected_mask[positions] = True
        return selected_mask

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[Tensor, list[Metric]]:
        """`(part of the step's loss, metrics)` from tensors [N]. Entries outside the response mask have no
        effect."""
        settings = self.settings
        mask = batch.response_mask
        loss_mask = batch.loss_mask
        inputs = self._inputs(outputs, batch)
        losses, measured = self.compute(inputs, **self.parameters)
        if batch.importance is not None:
            losses = losses * replace_outside(batch.importance, mask)
        factors = token_factors(
            loss_mask,
            batch.weights,
            batch.sequence_id,
            len(batch.lengths),
            batch.denominators,
            settings.aggregation,
            batch.episode_tokens,
        )
        total = aggregate(losses, loss_mask, factors)
        parts = {"actor/pg_loss": total}
        if settings.use_kl_loss:
            full = inputs.logprobs
            if outputs.full_logprobs is not None:
                full = replace_outside(outputs.full_logprobs.float(), mask)
            reference = replace_outside(batch.ref_logprobs, mask)
            kl = kl_divergence(full, reference, settings.kl_loss_type)
            parts["actor/kl_loss"] = aggregate(kl, loss_mask, factors)
            total = total + settings.kl_loss_coef * parts["actor/kl_loss"]
        # Always measured, in nats per token: a collapsing policy shows here first.
        if outputs.entropy is not None:
            measured["actor/entropy"] = outputs.entropy.detach()
        if settings.entropy_loss_coef:
            entropy = outputs.entropy.float()
            if batch.entropy_share is not None:
                entropy = entropy * batch.entropy_share
            entropy = aggregate(entropy, loss_mask, factors)
            total = total - settings.entropy_loss_coef * entropy
        parts["actor/total_loss"] = total
        metrics = loss_metrics(parts, batch) + token_metrics(inputs, measured, batch.weights)
        if batch.rollout_logprobs is not None:
            policy = inputs.logprobs if settings.use_rollout_log_probs else inputs.old_logprobs
            metrics += token_mismatch(policy, batch.rollout_logprobs, mask)
        return total, metrics

    def _inputs(self, outputs: ModelOutputs, batch: Batch) -> PolicyInputs:
        mask = batch.response_mask
        logprobs = replace_outside(outputs.logprobs.float(), mask)
        old_logprobs = logprobs.detach()
        if batch.old_logprobs is not None:
            old_logprobs = replace_outside(batch.old_logprobs, mask)
        return PolicyInputs(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=replace_outside(batch.advantages, mask),
            spans=Spans.of(batch),
            granularity=self.settings.granularity,
            selected_mask=batch.selected_mask,
        )

    def divisor(self, denominators: Denominators) -> float:
        """The denominator of the step in the aggregation mode (`step_denominator`)."""
        return step_denominator(denominators, self.settings.aggregation)

    def whole(self, metrics: Sequence[Metric], denominators: Denominators) -> list[Metric]:
        """The `metrics` of a step's parts, with the losses rescaled from means over tokens to the aggregation
        mode."""
        scale = denominators.num_tokens / self.divisor(denominators)

        def rescaled(metric: Metric) -> Metric:
            if metric.name not in LOSS_METRICS:
                return metric
            return metric._replace(value=metric.value * scale)

        return [rescaled(metric) for metric in metrics]


def loss_metrics(parts: dict[str, Tensor], batch: Batch) -> list[Metric]:
    """One metric per entry of `parts`: its name → what the micro-batch adds to this loss of its step. A
    metric's weight is the micro-batch's share of the step's tokens. Shares sum to 1, so means are over
    *optimiser steps*, however each was split."""
    tokens = replace_outside(batch.weights, batch.loss_mask).sum()
    num_tokens = max(batch.denominators.num_tokens, torch.finfo(torch.float32).tiny)
    share = tokens / num_tokens
    divisor = torch.where(share > 0, share, torch.ones_like(share))
    metrics = []
    for name, part in parts.items():
        value = (part / divisor).detach()
        metrics.append(Metric(name, value, "mean", weight=share))
    return metrics


def token_metrics(inputs: PolicyInputs, measured: dict[str, Tensor], weights: Tensor) -> list[Metric]:
    """The policy's distance from `old_logprobs`, the ratio's mean and extremes, and `measured`; means over
    trained tokens."""
    mask = inputs.mask
    ratio = inputs.ratio.detach()
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
    highest = replace_outside(ratio, mask, float("-inf")).max()
    lowest = replace_outside(ratio, mask, float("inf")).min()
    metrics.append(Metric("actor/ratio_max", highest, "max", weight=count))
    metrics.append(Metric("actor/ratio_min", lowest, "min", weight=count))
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
        if self.is_by_turn:
            mask = first_tokens(batch)
            num_states = batch.denominators.num_turns
        else:
            mask = batch.response_mask
            num_states = batch.denominators.num_tokens
        values = replace_outside(outputs.values.float(), mask)
        old = replace_outside(batch.values, mask)
        returns = replace_outside(batch.returns, mask)
        errors = (values - returns).square()
        losses = errors
        measured = {"critic/value": old, "critic/vpred": values, "critic/error": errors}
        if self.clip is not None:
            clipped_values = values.clamp(old - self.clip, old + self.clip)
            clipped = (clipped_values - returns).square()
            losses = torch.maximum(errors, clipped)
            measured["critic/clipfrac"] = clipped > errors
        share = replace_outside(batch.weights, mask)
        factors = _divided(share, num_states)
        total = 0.5 * aggregate(losses, mask, factors)
        metrics = loss_metrics({"critic/loss": total}, batch)
        metrics += mean_metrics(measured, mask, batch.weights)
        return total, metrics


def first_tokens(batch: Batch) -> Tensor:
    """bool [N]: the first trained token of each turn, even if tokens in the turn's middle aren't trained
    on."""
    trained = batch.response_mask.nonzero().squeeze(-1)
    turn = Spans.of(batch).turn_id[trained]
    is_first = torch.ones_like(trained, dtype=torch.bool)
    is_first[1:] = turn[1:] != turn[:-1]
    return torch.zeros_like(batch.response_mask).index_put((trained,), is_first)
