"""The loss of whole optimiser steps, every variant × aggregation × correction, against loops over tokens
written from the formulas, with NaN outside the mask, and cut into micro-batches in different ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.algorithms.losses import PolicyLoss
from turnwise.algorithms.settings import AlgorithmSettings, Correction, ImportanceWeight, RatioBand
from turnwise.batching.pack import pack, unpack
from turnwise.batching.plan import denominators
from turnwise.spec import LOSS_AGG_MODES, PG_VARIANTS
from turnwise.tracking.metrics import reduce_metrics
from turnwise.types import Batch, ModelOutputs, Sample, TurnSpan

MAX_LENGTH = 16
BANDS = {"token": (0.7, 1.4), "segment": (0.7, 1.4), "geometric": (0.8, 1.1), "sequence": (0.2, 3.0)}
"""Each takes some tokens out of the step and leaves some."""
CORRECTIONS = {
    "none": Correction(),
    **{f"weights of a {name}": Correction(ImportanceWeight(name, cap=1.2)) for name in BANDS},
    **{f"band of a {name}": Correction(filters=(RatioBand(name, *BANDS[name]),)) for name in BANDS},
    "both": Correction(
        ImportanceWeight("segment", 1.3), (RatioBand("token", 0.5, 1.6), RatioBand("geometric", 0.8, 1.3))
    ),
}
RATIO_TYPES = [
    (name, ratio_type)
    for name, spec in PG_VARIANTS.items()
    for ratio_type in (None, "segment")[: 1 + bool(spec.granularities)]
]
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_loss_coef": 0.05}
COV = {"fraction": 0.3}
"""Enough tokens of a small step that the choice shows."""


def settings(
    variant: str, mode: str = "token-mean", correction: str = "none", ratio_type: Any = None
) -> AlgorithmSettings:
    extra = (
        {"pg_args": COV | ({"covariance_low": 0.0} if variant == "clip_cov" else {})}
        if variant.endswith("_cov")
        else {}
    )
    corrected = CORRECTIONS[correction]
    return AlgorithmSettings(
        pg_variant=variant,
        loss_agg_mode=mode,
        ratio_type=ratio_type,
        train_infer_correction=corrected,
        **extra,
        **KL,
    )


@dataclass
class Step:
    """Samples of an optimiser step with the forward pass of the update, in their order."""

    samples: list[Sample]
    logprobs: list[torch.Tensor]
    entropy: list[torch.Tensor]


def random_step(seed: int = 0) -> Step:
    """Six contexts of up to three turns with holes in them, one of them without trained tokens, of different
    weights."""
    rng = np.random.default_rng(seed)
    samples, logprobs, entropy = [], [], []
    for index in range(6):
        length = int(rng.integers(9, MAX_LENGTH))
        spans = (TurnSpan(0, 2, 4), TurnSpan(1, 5, 8), TurnSpan(2, 8, length))[: int(rng.integers(1, 4))]
        mask = np.zeros(length, np.bool_)
        for span in spans:
            mask[span.start : span.stop] = True
        mask[6] = False
        if index == 3:
            mask[:] = False
        arrays = {
            name: rng.normal(scale=0.4, size=length).astype(np.float32)
            for name in ("old_logprobs", "rollout_logprobs")
        }
        arrays |= {
            name: rng.normal(size=length).astype(np.float32) for name in ("ref_logprobs", "advantages")
        }
        arrays = {name: np.where(mask, array, np.float32(0)) for name, array in arrays.items()}
        weight = (1.0, 0.5, 1.0, 1.0, 0.25, 1.0)[index]
        samples.append(Sample(np.arange(length), mask, turn_spans=spans, weight=weight, **arrays))
        logprobs.append(
            torch.tensor(arrays["old_logprobs"] + rng.normal(scale=0.4, size=length).astype(np.float32))
        )
        entropy.append(torch.tensor(rng.random(length).astype(np.float32)))
    return Step(samples, logprobs, entropy)


def prepared(step: Step, loss: PolicyLoss) -> list[Sample]:
    """As `pipelines.model_role` does it."""
    batch = pack(step.samples, denominators(step.samples, MAX_LENGTH))
    annotations, _ = loss.prepare(batch, seed=5)
    known = {
        name: unpack(array, batch.lengths)
        for name, array in annotations._asdict().items()
        if array is not None
    }
    return [
        replace(s, **{name: parts[i] for name, parts in known.items()}) for i, s in enumerate(step.samples)
    ]


def run(
    step: Step, loss: PolicyLoss, cuts: Sequence[Sequence[int]]
) -> tuple[float, list[torch.Tensor], dict[str, float]]:
    """The loss of the step, its gradient by the log-probs of each sample and its metrics, cut like this."""
    samples = prepared(step, loss)
    divisors = denominators(samples, MAX_LENGTH)
    leaves = [logprobs.clone().requires_grad_() for logprobs in step.logprobs]
    total, metrics = 0.0, []
    for cut in cuts:
        batch: Batch = pack([samples[i] for i in cut], divisors).map(torch.as_tensor)
        entropy = torch.cat([step.entropy[i] for i in cut])
        value, emitted = loss(
            ModelOutputs(logprobs=torch.cat([leaves[i] for i in cut]), entropy=entropy), batch
        )
        value.backward()
        total += value.item()
        metrics += emitted
    return total, [leaf.grad for leaf in leaves], reduce_metrics(metrics)


WHOLE = [range(6)]
OTHER_VALUES = {
    **{"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 1.05, "cap": 1.1},
    **{"tau_positive": 2.0, "tau_negative": 2.0, "tau": 0.5, "weight_positive": 0.5, "weight_negative": 0.5},
    **{"fraction": 0.6, "covariance_low": 0.3, "covariance_high": 0.1, "coef": 2.0},
}


# What the formulas say, token by token. Numbers are zero-dimensional tensors of float64, so that gradients
# come along.


def units(sample: Sample, granularity: str) -> list[list[int]]:
    """The positions that share a ratio."""
    trained = [int(i) for i in np.flatnonzero(sample.response_mask)]
    if granularity == "token":
        return [[i] for i in trained]
    if granularity == "segment":
        turns = [[i for i in trained if span.start <= i < span.stop] for span in sample.turn_spans]
        return [turn for turn in turns if turn]
    return [trained] if trained else []


def rho(sample: Sample, granularity: str) -> dict[int, float]:
    difference = sample.old_logprobs.astype(np.float64) - sample.rollout_logprobs
    found = {}
    for unit in units(sample, granularity):
        exponent = sum(difference[i] for i in unit)
        found |= dict.fromkeys(
            unit, math.exp(exponent if granularity == "sequence" else exponent / len(unit))
        )
    return found


def clipped(ratio: Any, advantage: float, low: float, high: float) -> Any:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def loss_of_unit(
    name: str, p: dict, lp: list, old: list[float], advantages: list[float], chosen: list[bool]
) -> list:
    """The losses of the tokens of one unit, whose ratio they share."""
    differences = [x - o for x, o in zip(lp, old, strict=True)]
    r, mean = torch.exp(sum(differences) / len(lp)), sum(advantages) / len(lp)
    if name == "gspo":
        return [clipped(r, mean, p["clip_low"], p["clip_high"])] * len(lp)
    if name == "gmpo":
        sign = np.sign(mean)
        bounded = [
            sign * torch.minimum(sign * d, sign * d.clamp(-p["clip_low"], p["clip_high"]))
            for d in differences
        ]
        return [-mean * torch.exp(sum(bounded) / len(lp))] * len(lp)
    losses = []
    for x, a, d, is_chosen in zip(lp, advantages, differences, chosen, strict=True):
        match name:
            case "ppo":
                value = clipped(r, a, p["clip_low"], p["clip_high"])
                value = torch.minimum(value, torch.tensor(-p["dual_clip"] * a)) if a < 0 else value
            case "cispo":
                value = -r.detach().clamp(1 - p["clip_low"], 1 + p["clip_high"]) * a * x
            case "sapo":
                tau = p["tau_positive"] if a > 0 else p["tau_negative"]
                value = -a * 4 / tau / (1 + torch.exp(-tau * (r - 1)))
            case "vanilla":
                value = -a * x
            case "tis":
                value = -r.detach().clamp(0, p["cap"]) * a * x
            case "topr":
                value = (
                    -p["weight_positive"] * a * x
                    if a > 0
                    else -p["weight_negative"] * r.detach().clamp(0, 1) * a * x
                )
            case "kimi15":
                value = -a * x + p["tau"] / 2 * d**2
            case "clip_cov":
                value = clipped(r, a, p["clip_low"], p["clip_high"]) * (not is_chosen)
            case "kl_cov":
                value = -r * a + (p["coef"] * d.abs() if is_chosen else 0.0)
        losses.append(value)
    return losses


def brute_force(step: Step, config: AlgorithmSettings) -> tuple[float, list[torch.Tensor]]:
    loss = PolicyLoss(config)
    samples = prepared(step, loss)
    correction, spec = config.train_infer_correction, PG_VARIANTS[config.pg_variant]
    kind = config.ratio_type or (spec.granularities or ("token",))[0]
    leaves = [x.double().requires_grad_() for x in step.logprobs]
    terms, num_tokens, num_sequences = [], 0.0, 0.0
    for sample, lp, entropy in zip(samples, leaves, step.entropy, strict=True):
        token_losses: dict[int, Any] = {}
        for unit in units(sample, kind):
            picked = [
                bool(sample.selected_mask[i]) if sample.selected_mask is not None else False for i in unit
            ]
            old, advantages = (
                [float(array[i]) for i in unit] for array in (sample.old_logprobs, sample.advantages)
            )
            values = loss_of_unit(
                config.pg_variant, loss.parameters, [lp[i] for i in unit], old, advantages, picked
            )
            token_losses |= dict(zip(unit, values, strict=True))
        kept = [
            i
            for i in token_losses
            if all(band.low <= rho(sample, band.granularity)[i] <= band.high for band in correction.filters)
        ]
        if not kept:
            continue
        total = 0.0
        for i in kept:
            weights = correction.weights
            weight = min(rho(sample, weights.granularity)[i], weights.cap) if weights else 1.0
            d = lp[i] - float(sample.ref_logprobs[i])
            total = (
                total + weight * token_losses[i] + 0.1 * (torch.exp(-d) + d - 1) - 0.05 * float(entropy[i])
            )
        if config.loss_agg_mode == "seq-mean-token-mean":
            total = total / len(kept)
        terms.append(sample.weight * total)
        num_tokens += sample.weight * len(kept)
        num_sequences += sample.weight
    divisor = num_tokens if config.loss_agg_mode == "token-mean" else num_sequences
    value = sum(terms) / (divisor * (MAX_LENGTH if config.loss_agg_mode == "seq-mean-token-sum-norm" else 1))
    value.backward()
    return value.item(), [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def assert_brute_force(config: AlgorithmSettings) -> None:
    step = random_step()
    value, gradients, metrics = run(step, PolicyLoss(config), WHOLE)
    expected, expected_gradients = brute_force(step, config)
    assert value == pytest.approx(expected, abs=2e-6)
    assert metrics["actor/total_loss"] == pytest.approx(expected, abs=2e-6)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), expected_gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("variant", "ratio_type"), RATIO_TYPES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_value_and_gradient_are_those_of_the_formulas(variant, ratio_type, mode):
    assert_brute_force(settings(variant, mode, ratio_type=ratio_type))


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_corrected_value_and_gradient_are_those_of_the_formulas(correction, mode):
    for variant in ("ppo", "gspo", "kl_cov"):
        assert_brute_force(settings(variant, mode, correction))


@pytest.mark.parametrize("variant", PG_VARIANTS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_neither_cuts_nor_what_stands_outside_the_mask_change_anything(variant, correction):
    # Any two of variant, correction and mode meet.
    modes = list(LOSS_AGG_MODES)
    mode = modes[(list(PG_VARIANTS).index(variant) + list(CORRECTIONS).index(correction)) % len(modes)]
    loss = PolicyLoss(settings(variant, mode, correction))
    value, gradients, metrics = run(random_step(), loss, WHOLE)
    part, part_gradients, part_metrics = run(poisoned(math.nan), loss, [[5, 0], [3], [1, 4, 2]])
    assert part == pytest.approx(value, abs=1e-6)
    for gradient, expected in zip(part_gradients, gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-6)
    assert part_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("variant", PG_VARIANTS)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_what_stands_outside_the_mask_changes_no_bit(variant, poison):
    loss = PolicyLoss(settings(variant, correction="both"))
    value, gradients, metrics = run(random_step(), loss, WHOLE)
    other, other_gradients, other_metrics = run(poisoned(poison), loss, WHOLE)
    assert (other, other_metrics) == (value, metrics)
    assert torch.equal(torch.cat(other_gradients), torch.cat(gradients))


def poisoned(value: float) -> Step:
    """The random step with `value` wherever nothing is trained on."""
    step = random_step()
    for sample, logprobs, entropy in zip(step.samples, step.logprobs, step.entropy, strict=True):
        arrays = (sample.old_logprobs, sample.rollout_logprobs, sample.ref_logprobs, sample.advantages)
        for array in (*arrays, logprobs, entropy):
            array[~sample.response_mask] = value
    return step


@pytest.mark.parametrize("variant", PG_VARIANTS)
def test_every_parameter_has_an_effect(variant):
    """The effect is on the value or on the gradient: where a bound holds a loss, it has no gradient."""
    base = settings(variant)
    steps = [random_step(seed) for seed in range(3)]
    for name in PG_VARIANTS[variant].parameters:
        changed = replace(base, pg_args={**base.pg_args, name: OTHER_VALUES[name]})
        assert any(differs(step, base, changed) for step in steps), name


def differs(step: Step, config: AlgorithmSettings, other: AlgorithmSettings) -> bool:
    value, gradients, _ = run(step, PolicyLoss(config), WHOLE)
    other_value, other_gradients, _ = run(step, PolicyLoss(other), WHOLE)
    return value != other_value or not all(
        torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True)
    )


@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "none"])
def test_the_corrections_tried_here_change_some_tokens_and_leave_some(correction):
    samples = prepared(random_step(), PolicyLoss(settings("ppo", correction=correction)))
    mask, counted = (
        np.concatenate([getattr(s, name) for s in samples]) for name in ("response_mask", "loss_mask")
    )
    assert counted.any() and (counted < mask).any() == correction.startswith(("band", "both"))


def bonus(step: Step, **extra: Any) -> float:
    """What an entropy bonus of weight 1 adds to the loss of the step, cut in three."""
    cuts = [[0, 5], [1, 2, 3], [4]]
    losses = []
    for values in ({"entropy_loss_coef": 1.0, **extra}, {}):
        losses.append(run(step, PolicyLoss(AlgorithmSettings(**values)), cuts)[0])
    return losses[0] - losses[1]


def test_the_bonus_falls_to_nothing_at_the_target_of_the_entropy():
    step = random_step()
    tokens = [(s, i) for s in step.samples for i in np.flatnonzero(s.response_mask)]
    weights = [s.weight for s, _ in tokens]
    for sample in step.samples:
        sample.old_logprobs = -abs(sample.old_logprobs)
    old = [float(s.old_logprobs[i]) for s, i in tokens]
    entropy = -float(np.average(old, weights=weights))
    whole = bonus(step)
    assert whole < 0
    assert bonus(step, target_entropy=2 * entropy) == pytest.approx(whole / 2, rel=1e-4)
    assert bonus(step, target_entropy=4 * entropy) == pytest.approx(whole * 3 / 4, rel=1e-4)
    assert bonus(step, target_entropy=entropy / 2) == pytest.approx(0.0, abs=1e-6)


def test_the_share_of_the_bonus_is_measured_on_what_is_known():
    step = random_step()
    loss = PolicyLoss(AlgorithmSettings(entropy_loss_coef=1.0, target_entropy=1.0))
    samples = [replace(sample, old_logprobs=None) for sample in step.samples]
    batch = pack(samples, denominators(samples, MAX_LENGTH))
    annotations, metrics = loss.prepare(batch, seed=0)
    shares = reduce_metrics(metrics)
    assert set(annotations.entropy_share) == {np.float32(shares["actor/entropy_share"])}
