"""Settings of credit assignment and losses. `examine.algorithm` makes them from the config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from turnwise.spec import (
    Granularity,
    Grouping,
    KLEstimator,
    LossAggMode,
    NamesAlgorithm,
    NormalizationMethod,
    Statistic,
)


@dataclass(frozen=True, slots=True)
class RewardNormalization:
    """How scores are centred and scaled. None means the estimator's default; for the two statistics, the
    method's default."""

    grouping: Grouping | None = None
    method: NormalizationMethod | None = None
    norm_mean_type: Statistic | None = None
    norm_std_type: Statistic | None = None


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """Multiplies each token's loss by min(ρ, cap), with ρ = exp(old − sampled) over the span of
    `granularity`."""

    granularity: Granularity = "token"
    cap: float = 2.0


@dataclass(frozen=True, slots=True)
class RatioBand:
    """A filter: a token stays in the loss if low ≤ ρ ≤ high, with ρ = exp(old − sampled) over the span of
    `granularity`."""

    granularity: Granularity = "token"
    low: float = 0.5
    high: float = 2.0


@dataclass(frozen=True, slots=True)
class Correction:
    """How the loss is corrected for differences between sampler and trainer: by importance weights and by
    filters. A token stays in the loss if it passes every filter. A Correction without weights and filters is
    falsy."""

    weights: ImportanceWeight | None = None
    filters: tuple[RatioBand, ...] = ()

    def __bool__(self) -> bool:
        return self.weights is not None or bool(self.filters)


@dataclass(frozen=True, slots=True)
class AlgorithmSettings(NamesAlgorithm):
    """Every key of the config's algorithm section that appears in a formula, under the same name.

    The config has checked the values, and put the clip keys (`pg_clip`, `dual_clip_loss`, …) into `pg_args`.
    Where the estimator or the variant has a default in `turnwise.spec`, None means that default.

    >>> AlgorithmSettings(pg_args={"clip_high": 0.28}).variant_parameters()
    {'clip_low': 0.2, 'clip_high': 0.28, 'dual_clip': 3.0}
    """

    adv_estimator: str = "grpo"
    pg_variant: str = "ppo"
    pg_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the `pg_variant`."""
    ratio_type: Literal["token", "segment"] | None = None
    value_clip: float | None = None
    loss_agg_mode: LossAggMode | None = None
    entropy_loss_coef: float = 0.0
    target_entropy: float | None = None

    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: KLEstimator = "k3"
    add_token_level_kl: bool = False
    """Whether the KL is subtracted from the reward."""
    init_kl_coef: float = 0.0
    target_kl: float | None = None
    kl_horizon: float = 10_000.0
    kl_penalty: KLEstimator = "k1"

    gamma: float = 1.0
    lambd: float | None = None
    """GAE's λ; None = 1, or 0.95 if `gae_granularity` is turn."""
    gae_granularity: Literal["token", "turn"] = "token"
    bootstrap_on_truncation: bool = True
    reward_placement: Literal["turn", "final"] | None = None
    reward_normalization: RewardNormalization = RewardNormalization()
    whiten_rewards: bool = False
    whiten_advantages: bool = False
    advantage_clip: float | None = None
    reward_clip: float | None = None
    episode_reward_weight: float = 1.0
    step_reward_weight: float = 1.0
    step_reward_gamma: float = 0.95
    use_rollout_log_probs: bool = False
    """Whether the samples' `old_logprobs` are the sampler's log-probs."""
    train_infer_correction: Correction = Correction()

    @property
    def needs(self) -> frozenset[str]:
        """What credit and loss need: `values`, `old_logprobs`, `ref_logprobs`, `greedy_sibling`. The pipeline
        adds old log-probs if samples are stale or several optimiser steps are taken."""
        needs = set(self.estimator.needs)
        if self.train_infer_correction or self.variant.chooses_tokens:
            needs.add("old_logprobs")
        if self.add_token_level_kl:
            needs |= {"old_logprobs", "ref_logprobs"}
        if self.use_kl_loss:
            needs.add("ref_logprobs")
        return frozenset(needs)

    @property
    def aggregation(self) -> LossAggMode:
        """`loss_agg_mode`, or the variant's default."""
        return self.loss_agg_mode or self.variant.aggregation

    @property
    def granularity(self) -> Granularity:
        """The span of the probability ratio: `ratio_type`, or the variant's default; `token` for a variant
        without a ratio."""
        return self.ratio_type or (*self.variant.granularities, "token")[0]

    def variant_parameters(self) -> dict[str, Any]:
        """The variant's defaults, overridden by `pg_args`; for a user's own variant, `pg_args` unchanged."""
        return {**self.variant.parameters, **self.pg_args}
