"""Settings of credit assignment and of the losses. The formulas are in `turnwise.algorithms`."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from turnwise.config.schema.section import (
    Count,
    Fraction,
    NonNegative,
    OneOf,
    Positive,
    PositiveCount,
    Section,
    aliased,
    derived,
)
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


class Statistics(NamedTuple):
    """What a mean and a standard deviation are taken over: `group`, `batch`, `running` or `none`."""

    mean: str
    std: str


class RewardNormalizationArgs(Section):
    """How scores are centred and scaled. The defaults of `grouping` and `method` depend on the estimator."""

    grouping: Annotated[Grouping, aliased(GROUPING_ALIASES)] = derived()
    """Normalise per task (`traj_group_id`/`state`), tag (`tags`/`inductive`) or batch (`batch`/`global`) [the
    estimator's]."""
    method: NormalizationMethod = derived()
    """Score s becomes: `identity` s, `mean` s − μ, `mean_std` (s − μ)/σ, `asym_clip` that clamped to −1…3
    [the estimator's]."""
    norm_mean_type: Statistic | None = None
    """Scores over which the mean μ is taken; `running` = all since training began [the method's default]."""
    norm_std_type: Statistic | None = None
    """Scores over which the standard deviation σ is taken [the method's default]."""

    @property
    def statistics(self) -> Statistics:
        """`norm_mean_type` and `norm_std_type`, or the method's defaults."""
        mean, std = METHOD_STATISTICS[self.method]
        return Statistics(self.norm_mean_type or mean, self.norm_std_type or std)

    @property
    def changes_scores(self) -> bool:
        return self.statistics != ("none", "none")


class ImportanceWeightArgs(Section):
    """Importance weights on the loss: ratios exp(old log-prob − sampler's log-prob), capped at an upper
    bound."""

    enabled: bool = True
    """False leaves the loss as it is."""
    weight_type: Granularity = "token"
    """Ratio of a `token`; of a turn (`segment`) or sequence (`geometric`), a geometric mean; or of a
    `sequence`, a product."""
    upper_bound: Positive = 2.0
    """Larger weights are replaced by this value."""
    detach: Literal[True] = True
    """Always true: no gradient flows through the weight."""


class RatioFilter(Section):
    """Removes tokens from the loss if their ratio exp(old log-prob − sampler's log-prob) lies outside a
    band."""

    enabled: bool = True
    """False leaves all tokens in the loss."""
    agg_type: Granularity = "token"
    """Ratio of a `token`; of a turn (`segment`) or sequence (`geometric`), a geometric mean; or of a
    `sequence`, a product."""
    ratio_low: NonNegative = 0.5
    """Lower end of the band."""
    ratio_high: Positive = 2.0
    """Upper end of the band."""


class TrainInferCorrection(Section):
    """Correction of the loss for tokens whose log-probs differ between sampler and trainer."""

    is_weight: ImportanceWeightArgs | None = None
    filters: list[RatioFilter] = Field(default_factory=list)

    @property
    def is_enabled(self) -> bool:
        """Whether weights or a filter are enabled."""
        if self.is_weight and self.is_weight.enabled:
            return True
        return any(band.enabled for band in self.filters)


class AlgorithmKeys(NamesAlgorithm, Section):
    """The algorithm's keys, at the top level of a config."""

    adv_estimator: Annotated[str, AfterValidator(OneOf(ESTIMATORS, form="module:Class"))] = "grpo"
    """How rewards become advantages."""
    pg_variant: Annotated[str, AfterValidator(OneOf(PG_VARIANTS, form="module:function"))] = "ppo"
    """The policy loss."""
    pg_args: dict[str, Any] = derived()
    """The pg_variant's parameters by name [the variant's defaults; pg_clip… and dual_clip_loss set its
    clips]."""
    ratio_type: Literal["token", "segment"] | None = None
    """What one probability ratio covers: a token, or a turn (`segment`) [the variant's default]."""
    ppo_epochs: PositiveCount = 1
    """Passes over each batch."""
    gamma: Fraction = 1.0
    """Discount per token; per turn for agentic_reinforce, and for gae with gae_granularity turn."""
    lambd: Fraction = derived()
    """GAE's λ [1; 0.95 for gae_granularity turn]."""
    gae_granularity: Literal["token", "turn"] = "token"
    """One temporal difference per token, or per turn."""
    bootstrap_on_truncation: bool = True
    """GAE adds the value of the last state if the environment or a time limit truncated the episode."""

    pg_clip: Positive | None = None
    """ε on both sides of the ratio's clip, 1 − ε and 1 + ε [the variant's default; 0.2 for ppo]."""
    use_pg_clip_range: bool = False
    """Take pg_clip_low and pg_clip_high instead of pg_clip, where they are set."""
    pg_clip_low: Positive | None = None
    """ε of the lower clip, 1 − ε [pg_clip]."""
    pg_clip_high: Positive | None = None
    """ε of the upper clip, 1 + ε [pg_clip]."""
    dual_clip_loss: bool = True
    """ppo's second clip, which bounds the loss of tokens with a negative advantage."""
    value_clip: Positive | None = None
    """PPO's value clip: the critic's loss doesn't reward moving a value further than this from its old
    one."""

    add_token_level_kl: bool = False
    """Subtract each token's β·KL(old, reference) from its reward."""
    init_kl_coef: NonNegative = 0.0
    """β of the KL in the reward."""
    kl_penalty: Annotated[KLEstimator, aliased(KL_ALIASES)] = "k1"
    """KL estimator in the reward (`kl` = k1, `mse` = k2, `low_var` = k3)."""
    target_kl: Positive | None = None
    """KL in nats per token that an adaptive β aims at; unset = β is fixed."""
    kl_horizon: Positive = 10_000.0
    """Slows the adaptive β: a batch of n trajectories changes it by a factor of at most 1 ± 0.2·n /
    kl_horizon."""
    use_kl_loss: bool = False
    """Add kl_loss_coef × KL(current, reference) to the loss."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL in the loss."""
    kl_loss_type: Annotated[KLEstimator, aliased(KL_ALIASES)] = "k3"
    """KL estimator in the loss: k3 or k2."""

    reward_placement: Literal["turn", "final"] | None = None
    """`turn`: each turn's reward on its last token; `final`: the score on an episode's last token [the
    estimator's default]."""
    reward_normalization: RewardNormalizationArgs = Field(default_factory=RewardNormalizationArgs)
    reward_clip: Positive | None = None
    """The estimator's rewards, scores or step returns are clamped to ± this, after any normalisation."""
    whiten_rewards: bool = False
    """Whiten the tokens' rewards over the batch, before returns are computed from them."""
    whiten_advantages: bool = False
    """Whiten the tokens' advantages over the batch."""
    advantage_clip: Positive | None = None
    """Advantages are clamped to ± this."""
    episode_reward_weight: float = 1.0
    """GiGPO: weight of the episode's advantage."""
    step_reward_weight: float = 1.0
    """GiGPO: weight of the step's advantage."""
    step_reward_gamma: Fraction = 0.95
    """Discount per turn of step returns (gigpo, step_reinforce)."""

    entropy_loss_coef: float = 0.0
    """Weight of the entropy bonus."""
    target_entropy: Positive | None = None
    """Entropy in nats per token that the bonus holds: the weight falls from entropy_loss_coef at an entropy
    of 0 to nothing at this one; unset = the weight is constant."""
    loss_agg_mode: LossAggMode = derived()
    """How the losses of tokens become one number [the variant's default; token-mean for ppo]."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm."""
    critic_warmup: Count = 0
    """Number of steps at the start in which only the critic is trained."""

    train_infer_correction: TrainInferCorrection | None = None
    use_rollout_log_probs: bool = False
    """Use the sampler's log-probs as the old ones, which saves a forward pass."""
    group_filter: (
        Annotated[str, AfterValidator(OneOf(["non_zero_variance"], form="module:function"))] | None
    ) = None
    """Groups are replaced if this function returns False: `non_zero_variance` (scores differ) or your own
    `module:function`."""
    max_refill_factor: Positive = 3.0
    """Maximum number of groups played to replace filtered ones, as a multiple of the groups in a batch."""
