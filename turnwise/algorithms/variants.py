"""Policy-gradient losses of single tokens, one function a `pg_variant`. To minimise.

A variant returns its losses [N] and, by metric name, quantities [N] whose means over the trained tokens are logged. Its
parameters are keyword arguments with the names and defaults of `turnwise.spec.PG_VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.algorithms.kl import MAX_EXPONENT


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What a variant sees of a batch of N tokens in S sequences. Already replaced by 0 outside the mask."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_id: Tensor
    num_sequences: int

    @property
    def ratio(self) -> Tensor:
        """exp(lp − old) [N], exponent clamped to ±20."""
        return torch.exp((self.logprobs - self.old_logprobs).clamp(-MAX_EXPONENT, MAX_EXPONENT))


VariantResult = tuple[Tensor, dict[str, Tensor]]
Variant = Callable[..., VariantResult]


def ppo(inputs: PolicyInputs, *, clip_low: float, clip_high: float, dual_clip: float | None) -> VariantResult:
    """−min(rA, clip(r, 1−ε_lo, 1+ε_hi)·A), and at most −cA where A < 0 (`dual_clip` c, None = off).

    Without the second bound a token with A < 0 whose probability has grown has an unbounded loss.
    Schulman et al. 2017, arXiv:1707.06347, eq. 7; Ye et al. 2020, arXiv:1912.09729, eq. 5 (dual clip).
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    losses = torch.maximum(unclipped, clipped)
    shares = {
        "actor/clipfrac": clipped > unclipped,
        "actor/ppo_ratio_high_clipfrac": ratio > 1.0 + clip_high,
        "actor/ppo_ratio_low_clipfrac": ratio < 1.0 - clip_low,
    }
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(is_bounded, bound, losses)
        shares["actor/dual_clipfrac"] = is_bounded
    return losses, shares


VARIANTS: dict[str, Variant] = {"ppo": ppo}
