"""Credit, loss and their options. The formulas are in `turnwise.algorithms`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from turnwise.config.section import Count, NonNegative, OneOf, Positive, PositiveCount, Section, derived
from turnwise.spec import (
    ESTIMATORS,
    GROUPING_ALIASES,
    KL_ALIASES,
    METHOD_STATISTICS,
    PG_VARIANTS,
    Granularity,
    Grouping,
    KLEstimator,
    LossAggMode,
    NamesAlgorithm,
    NormalizationMethod,
    Statistic,
)


def _aliases(names: Mapping[str, str]) -> BeforeValidator:
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


class Statistics(NamedTuple):
    """The scores over which a mean and a standard deviation are taken."""

    mean: str
    std: str


class RewardNormalizationArgs(Section):
    """How scores are centred and scaled. Keys left out take the estimator's defaults."""

    grouping: Annotated[Grouping, _aliases(GROUPING_ALIASES)] = derived()
    """Scores in a group: siblings of a task (alias `state`), one environment tag (alias `inductive`), or the whole batch."""
    method: NormalizationMethod = derived()
    """What a score s becomes: s, s − μ, (s − μ)/σ, or (s − μ)/σ clamped to [−1, 3]."""
    norm_mean_type: Statistic | None = None
    """Scores over which the mean μ is taken [the method's default]."""
    norm_std_type: Statistic | None = None
    """Scores over which the deviation σ is taken [the method's default]."""

    @property
    def statistics(self) -> Statistics:
        """The scores over which mean and standard deviation are taken."""
        mean, std = METHOD_STATISTICS[self.method]
        return Statistics(self.norm_mean_type or mean, self.norm_std_type or std)

    @property
    def changes_scores(self) -> bool:
        return self.statistics != ("none", "none")


class ImportanceWeightArgs(Section):
    """Truncated importance weights exp(old − samp) on the loss."""

    enabled: bool = True
    """False leaves the loss as it is."""
    weight_type: Granularity = "token"
    """Span of the ratio: token, segment (a turn), geometric (mean of a sequence) or sequence (product)."""
    upper_bound: Positive = 2.0
    """Larger weights are replaced by this value."""
    detach: Literal[True] = True
    """Always true: the weight is a constant in the loss."""


class RatioFilter(Section):
    """Takes tokens out of the loss if their ratio exp(old − samp) lies outside a band."""

    enabled: bool = True
    """False takes nothing out."""
    agg_type: Granularity = "token"
    """Span of the ratio: token, segment (a turn), geometric (mean of a sequence) or sequence (product)."""
    ratio_low: NonNegative = 0.5
    """Lower end of the band."""
    ratio_high: Positive = 2.0
    """Upper end of the band."""


class TrainInferCorrection(Section):
    """Correction for differences between sampler and trainer."""

    is_weight: ImportanceWeightArgs | None = None
    filters: list[RatioFilter] = Field(default_factory=list)

    @property
    def is_enabled(self) -> bool:
        """Whether any part is enabled."""
        return bool(self.is_weight and self.is_weight.enabled) or any(band.enabled for band in self.filters)


class AlgorithmKeys(NamesAlgorithm, Section):
    """The algorithm's keys, at the top level of a config."""

    adv_estimator: Annotated[str, AfterValidator(OneOf(ESTIMATORS, own="module:Class"))] = "grpo"
    """How rewards become advantages."""
    pg_variant: Annotated[str, AfterValidator(OneOf(PG_VARIANTS, own="module:function"))] = "ppo"
    """The policy loss."""
    pg_args: dict[str, Any] = derived()
    """Parameters of the variant under its own names; the resolved config lists all of them, clips included."""
    ratio_type: Literal["token", "segment"] | None = None
    """What the probability ratio is taken over [the variant's default]; `segment` is a turn."""
    ppo_epochs: PositiveCount = 1
    """Passes over each batch."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per token (per turn for agentic_reinforce)."""
    lambd: Annotated[float, Field(ge=0, le=1)] = derived()
    """GAE's λ [1; 0.95 for gae_granularity turn]."""
    gae_granularity: Literal["token", "turn"] = "token"
    """One temporal difference per token, or per turn."""
    bootstrap_on_truncation: bool = True
    """GAE adds the value of the last state if the episode was truncated from outside."""

    pg_clip: Positive | None = None
    """ε of the ratio on both sides [the variant's default; 0.2 for ppo]."""
    use_pg_clip_range: bool = False
    """Use pg_clip_low and pg_clip_high."""
    pg_clip_low: Positive | None = None
    """ε of the lower clip, 1 − ε."""
    pg_clip_high: Positive | None = None
    """ε of the upper clip, 1 + ε."""
    dual_clip_loss: bool = True
    """Bound the loss of tokens with a negative advantage (ppo)."""
    value_clip: Positive | None = None
    """PPO's value clip: the loss doesn't reward moving a value further than this from its old one."""

    add_token_level_kl: bool = False
    """Subtract β·KL(old, reference) from the reward."""
    init_kl_coef: NonNegative = 0.0
    """β of the KL in the reward."""
    kl_penalty: Annotated[KLEstimator, _aliases(KL_ALIASES)] = "k1"
    """KL estimator in the reward (`kl` = k1, `mse` = k2, `low_var` = k3)."""
    target_kl: Positive | None = None
    """KL in nats per token that an adaptive β aims at; unset = β is fixed."""
    kl_horizon: Positive = 10_000.0
    """Trajectories over which the adaptive β changes."""
    use_kl_loss: bool = False
    """Add kl_loss_coef × KL(current, reference) to the loss."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL in the loss."""
    kl_loss_type: Annotated[KLEstimator, _aliases(KL_ALIASES)] = "k3"
    """KL estimator in the loss: k3 or k2."""

    reward_placement: Literal["turn", "final"] | None = None
    """Turn rewards on the last token of each turn, or the score on the episode's last token [the estimator's default]."""
    reward_normalization: RewardNormalizationArgs = Field(default_factory=RewardNormalizationArgs)
    reward_clip: Positive | None = None
    """Normalised rewards are clamped to ± this."""
    whiten_rewards: bool = False
    """Whiten token rewards over the batch before returns."""
    whiten_advantages: bool = False
    """Whiten advantages over the batch."""
    advantage_clip: Positive | None = None
    """Advantages are clamped to ± this."""
    episode_reward_weight: float = 1.0
    """GiGPO: weight of the episode's advantage."""
    step_reward_weight: float = 1.0
    """GiGPO: weight of the step's advantage."""
    step_reward_gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount per turn of step returns (gigpo, step_reinforce)."""

    entropy_loss_coef: float = 0.0
    """Weight of the entropy bonus."""
    loss_agg_mode: LossAggMode = derived()
    """How token losses become one number [the variant's default; token-mean for ppo]."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm."""
    critic_warmup: Count = 0
    """Number of first steps in which only the critic is trained."""

    train_infer_correction: TrainInferCorrection | None = None
    use_rollout_log_probs: bool = False
    """Use the sampler's log-probs as the old ones, which saves a forward pass."""
    group_filter: Annotated[str, AfterValidator(OneOf(["non_zero_variance"], own="module:function"))] | None = None
    """`non_zero_variance` or your own `module:function`: groups that it rejects are replaced."""
    max_refill_factor: Positive = 3.0
    """Maximum groups played to replace rejected ones, as a multiple of the groups in a batch."""
