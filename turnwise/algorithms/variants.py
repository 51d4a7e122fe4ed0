"""Policy-gradient losses of single tokens, one function per `pg_variant`, to be minimised.

A variant returns its losses [N] and, by metric name, quantities [N] whose means over the trained tokens are
logged. Its parameters are keyword arguments; their names and defaults are in `turnwise.spec.PG_VARIANTS`. A
user's own variant, `module:function`, has the same form; `pg_args` are its keyword arguments. In the formulas
lp is the log-prob, A the advantage, r = exp(lp − old) the probability ratio, and sg(x) is x without its
gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.algorithms.kl import MAX_EXPONENT
from turnwise.algorithms.masks import replace_outside
from turnwise.algorithms.ratios import Spans
from turnwise.errors import ConfigError
from turnwise.runtime.entry_points import load_function
from turnwise.spec import Granularity


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """The input of a variant: arrays [N] of a batch of N tokens, 0 outside the mask."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    spans: Spans
    granularity: Granularity = "token"
    """The span over which log-ratios are averaged for `ratio`: a token, a turn (`segment`) or a sequence
    (`geometric`)."""
    selected_mask: Tensor | None = None  # bool [N]: the tokens that `choices` has chosen for this variant

    @property
    def mask(self) -> Tensor:
        """bool [N]: the trained tokens."""
        return self.spans.mask

    @property
    def difference(self) -> Tensor:
        """lp − old [N] of each token, clamped to ±20."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_EXPONENT, MAX_EXPONENT)

    @property
    def ratio(self) -> Tensor:
        """exp(lp − old) [N], with the exponent averaged over the span of `granularity` and clamped to ±20."""
        exponent = self.averaged(self.logprobs - self.old_logprobs)
        return torch.exp(exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT))

    def averaged(self, x: Tensor) -> Tensor:
        """For each token the mean of `x` [N] over its span of `granularity`."""
        return self.spans.over(x, self.granularity)


VariantResult = tuple[Tensor, dict[str, Tensor]]
Variant = Callable[..., VariantResult]


def _shares(is_clipped: Tensor, x: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Flags [N] for the metrics: whether a token is clipped, and whether its (log-)ratio `x` is above `high`
    or below `low`."""
    return {
        "actor/clipfrac": is_clipped,
        "actor/ppo_ratio_high_clipfrac": x > high,
        "actor/ppo_ratio_low_clipfrac": x < low,
    }


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> VariantResult:
    """−min(rA, clip(r, 1−ε_lo, 1+ε_hi)·A) [N], and the flags of `_shares`."""
    low = 1.0 - clip_low
    high = 1.0 + clip_high
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(low, high) * advantages
    losses = torch.maximum(unclipped, clipped)
    shares = _shares(clipped > unclipped, ratio, low, high)
    return losses, shares


def _weighted(inputs: PolicyInputs, weights: Tensor) -> Tensor:
    """−sg(w)·A·lp [N]: the policy-gradient loss with a weight per token, through which no gradient flows."""
    return -weights.detach() * inputs.advantages * inputs.logprobs


def ppo(inputs: PolicyInputs, *, clip_low: float, clip_high: float, dual_clip: float | None) -> VariantResult:
    """−min(rA, clip(r, 1−ε_lo, 1+ε_hi)·A), and at most −cA where A < 0, with c = `dual_clip`; None leaves
    that loss unbounded. Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020,
    arXiv:1912.09729, eq. 5."""
    losses, shares = _clipped(inputs.ratio, inputs.advantages, clip_low, clip_high)
    if dual_clip is not None:
        bound = -dual_clip * inputs.advantages
        is_bounded = (inputs.advantages < 0) & (losses > bound)
        losses = torch.where(is_bounded, bound, losses)
        shares["actor/dual_clipfrac"] = is_bounded
    return losses, shares


def gspo(inputs: PolicyInputs, *, clip_low: float, clip_high: float) -> VariantResult:
    """−min(rA, clip(r, 1−ε_lo, 1+ε_hi)·A) at each token, with r = exp(mean of lp − old over the sequence) and
    the sequence's mean advantage A. With `ratio_type: segment` both are over the turn. Zheng et al. 2025,
    arXiv:2507.18071, eq. 5 to 7."""
    advantages = inputs.averaged(inputs.advantages)
    return _clipped(inputs.ratio, advantages, clip_low, clip_high)


def gmpo(inputs: PolicyInputs, *, clip_low: float, clip_high: float) -> VariantResult:
    """−A·exp(mean over the sequence of sgn(A)·min(sgn(A)Δ, sgn(A)·clip(Δ, −ε_lo, ε_hi))), with Δ = lp − old
    and the sequence's mean advantage A. With `ratio_type: segment` both means are over the turn. This is the
    geometric mean of ratios, each clipped in log space. Zhao et al. 2025, arXiv:2507.20673, eq. 4."""
    difference = inputs.difference
    advantages = inputs.averaged(inputs.advantages)
    sign = torch.sign(advantages)
    clipped = difference.clamp(-clip_low, clip_high)
    exponent = sign * torch.minimum(sign * difference, sign * clipped)
    is_clipped = sign * clipped < sign * difference
    shares = _shares(is_clipped, difference, -clip_low, clip_high)
    ratio = torch.exp(inputs.averaged(exponent))
    return -advantages * ratio, shares


def cispo(inputs: PolicyInputs, *, clip_low: float, clip_high: float) -> VariantResult:
    """−sg(clip(r, 1−ε_lo, 1+ε_hi))·A·lp: every token keeps a gradient. MiniMax 2025, arXiv:2506.13585, eq. 4
    and 5."""
    low = 1.0 - clip_low
    high = 1.0 + clip_high
    ratio = inputs.ratio
    weights = ratio.clamp(low, high)
    shares = _shares(weights != ratio, ratio, low, high)
    return _weighted(inputs, weights), shares


def sapo(inputs: PolicyInputs, *, tau_positive: float, tau_negative: float) -> VariantResult:
    """−A·(4/τ)·σ(τ(r − 1)), with τ = `tau_positive` where A > 0, else `tau_negative`. Where PPO's clip sets
    the gradient to 0, the sigmoid σ lets it fade; the slope of (4/τ)·σ at r = 1 is 1 for every τ. Gao et al.
    2025, arXiv:2511.20347."""
    advantages = inputs.advantages
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (inputs.ratio - 1.0))
    return -advantages * (4.0 / tau) * gate, {}


def vanilla(inputs: PolicyInputs) -> VariantResult:
    """−A·lp: the plain policy gradient (Williams 1992), which treats the samples as the current policy's."""
    losses = -inputs.advantages * inputs.logprobs
    return losses, {}


def tis(inputs: PolicyInputs, *, cap: float) -> VariantResult:
    """−sg(min(r, cap))·A·lp: truncated importance sampling (Ionides 2008)."""
    ratio = inputs.ratio
    losses = _weighted(inputs, ratio.clamp(max=cap))
    return losses, {"actor/clipfrac": ratio > cap}


def topr(inputs: PolicyInputs, *, weight_positive: float, weight_negative: float) -> VariantResult:
    """−w⁺·A·lp where A > 0, else −w⁻·sg(min(r, 1))·A·lp, so that the gradient of a bad token fades as the
    token gets rare. Le Roux et al. 2025, arXiv:2503.14286, eq. 8, with the sign of A instead of that of the
    reward."""
    ratio = inputs.ratio
    is_good = inputs.advantages > 0
    truncated = ratio.clamp(max=1.0)
    weights = torch.where(is_good, weight_positive, weight_negative * truncated)
    is_clipped = ~is_good & (ratio > 1.0)
    return _weighted(inputs, weights), {"actor/clipfrac": is_clipped}


def kimi15(inputs: PolicyInputs, *, tau: float) -> VariantResult:
    """−A·lp + τ/2·(lp − old)²: the square keeps the policy near old. Kimi Team 2025, arXiv:2501.12599,
    section 2.3.2."""
    losses = -inputs.advantages * inputs.logprobs
    penalty = 0.5 * tau * inputs.difference.square()
    return losses + penalty, {}


def clip_cov(
    inputs: PolicyInputs,
    *,
    clip_low: float,
    clip_high: float,
    fraction: float,
    covariance_low: float,
    covariance_high: float,
) -> VariantResult:
    """PPO's clipped loss, but 0 at the tokens chosen by `choices.clip_cov`, which have a high covariance of
    advantage and log-prob. Cui et al. 2025, arXiv:2505.22617, eq. 10 and 11."""
    losses, shares = _clipped(inputs.ratio, inputs.advantages, clip_low, clip_high)
    losses = losses.masked_fill(_selected_mask(inputs), 0.0)
    return losses, shares


def kl_cov(inputs: PolicyInputs, *, fraction: float, coef: float) -> VariantResult:
    """−rA, plus coef·|lp − old| at the tokens chosen by `choices.kl_cov`. Cui et al. 2025, arXiv:2505.22617,
    eq. 12 and 13."""
    losses = -inputs.ratio * inputs.advantages
    distance = replace_outside(inputs.difference.abs(), _selected_mask(inputs))
    return losses + coef * distance, {}


def _selected_mask(inputs: PolicyInputs) -> Tensor:
    if inputs.selected_mask is None:
        raise ValueError(
            "clip_cov and kl_cov need the tokens that PolicyLoss.prepare chooses over the whole optimiser "
            "step"
        )
    return inputs.selected_mask


_BUILT_IN = (ppo, gspo, gmpo, cispo, sapo, vanilla, tis, topr, kimi15, clip_cov, kl_cov)
VARIANTS: dict[str, Variant] = {variant.__name__: variant for variant in _BUILT_IN}


def find_variant(name: str, parameters: Mapping[str, Any]) -> Variant:
    """The function of a `pg_variant`. Raises ConfigError if a `module:function` is missing or can't get these
    `parameters`."""
    if name in VARIANTS:
        return VARIANTS[name]
    return load_function(name, "pg_variant", ConfigError, ["inputs"], parameters)
