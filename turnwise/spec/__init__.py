"""The names that config and registries share, with their parameters, defaults and needs, read from
`spec.yaml`. Reading them imports no torch. A name is *available* if this version implements it. `turnwise
config` accepts a valid name that isn't available; `turnwise train` refuses it and says so."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from turnwise.spec.package_tables import read_table

KLEstimator = Literal["k1", "abs", "k2", "k3"]
KL_ALIASES: dict[str, KLEstimator] = {"kl": "k1", "mse": "k2", "low_var": "k3"}

Grouping = Literal["traj_group_id", "tags", "batch"]
GROUPING_ALIASES: dict[str, Grouping] = {"state": "traj_group_id", "inductive": "tags", "global": "batch"}

Statistic = Literal["group", "batch", "running", "none"]
NormalizationMethod = Literal["identity", "mean", "mean_std", "asym_clip"]
METHOD_STATISTICS: dict[NormalizationMethod, tuple[Statistic, Statistic]] = {
    "identity": ("none", "none"),
    "mean": ("group", "none"),
    "mean_std": ("group", "group"),
    "asym_clip": ("group", "group"),
}
"""Method of `reward_normalization` → default `(norm_mean_type, norm_std_type)`: the scores over which each is
computed."""

OldLogProbs = Literal["if_needed", "always", "rollouts"]
"""The source of old log-probs: a forward pass if needed, always a forward pass, or the servers that sampled
the tokens."""
TokenValue = Literal["old", "ref", "entropy"]
"""A value of a sampled token that a run can record for readers."""
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSS_AGG_MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)
Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class EstimatorSpec:
    """One `adv_estimator`, and which config keys affect it. `entry` is `module:Class` of the Algorithm.
    `reward_placement` is the default of that config key; `score` means that the estimator works on trajectory
    scores. `normalization` is the default `(grouping, method)`; with `own` the estimator centres scores
    itself and refuses `reward_normalization`."""

    entry: str = ""
    needs: frozenset[str] = frozenset()
    reward_placement: Literal["turn", "final", "score"] = "score"
    normalization: tuple[Grouping, NormalizationMethod] | Literal["own"] = ("traj_group_id", "identity")
    needs_mean: bool = False
    """Whether scores must be normalised with a mean."""
    compares_siblings: bool = False
    """Whether advantages come from siblings alone, so that a group of one has none."""
    discounts: bool = False
    """Whether it reads `gamma`."""
    has_td_errors: bool = False
    """Whether it reads `lambd`, `gae_granularity` and `bootstrap_on_truncation`."""
    has_step_returns: bool = False
    """Whether it reads `step_reward_gamma`."""
    mixes_step_advantages: bool = False
    """Whether it reads `episode_reward_weight` and `step_reward_weight`."""
    needs_state_keys: bool = False
    """Whether it compares turns by `Turn.state_key`, which the built-in agents of rows don't set."""
    mixes_groups: bool = False
    """Whether the advantages of a group depend on other groups of its batch."""
    whitens_advantages: bool = False
    """Whether it always whitens, so that `whiten_advantages` adds nothing."""
    is_own: bool = False
    """Whether it is a user's class, which may read any key."""
    paper: str = ""

    @classmethod
    def of_user(cls, entry: str) -> "EstimatorSpec":
        """The spec of a user's `module:Class`. Nothing is known about it, so no key counts as useless."""
        return cls(
            entry,
            discounts=True,
            has_td_errors=True,
            has_step_returns=True,
            mixes_step_advantages=True,
            is_own=True,
        )


Granularity = Literal["token", "segment", "geometric", "sequence"]
"""What one probability ratio covers: a token; a turn (`segment`) or a sequence (`geometric`), as the
geometric mean of the tokens' ratios; or a sequence as the product of the tokens' ratios (`sequence`)."""


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One `pg_variant`: its `pg_args` with defaults, and its default `loss_agg_mode`. `granularities` lists
    what its ratio may cover, the default first; it is empty for a loss without a ratio."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    aggregation: LossAggMode = "token-mean"
    granularities: tuple[Granularity, ...] = ("token", "segment")
    chooses_tokens: bool = False
    """Whether the loss chooses tokens over the whole optimiser step, which needs old log-probs."""
    paper: str = ""

    def ratio_refusal(self, name: str, ratio_type: Granularity | None) -> str:
        """Why this variant can't use the `ratio_type`; empty if it can."""
        if ratio_type is None or ratio_type in self.granularities:
            return ""
        if not self.granularities:
            return f"pg_variant {name} has no probability ratio; remove ratio_type"
        return (
            f"pg_variant {name} takes its ratio over a whole sequence; use segment for turns, or pg_variant "
            "ppo for tokens"
        )


class NamesAlgorithm:
    """Settings that name an algorithm by `adv_estimator` and a loss by `pg_variant`."""

    __slots__ = ()
    adv_estimator: str
    pg_variant: str

    @property
    def estimator(self) -> EstimatorSpec:
        """The spec of `adv_estimator`. For a user's `module:Class` it is `EstimatorSpec.of_user`."""
        return ESTIMATORS.get(self.adv_estimator) or EstimatorSpec.of_user(self.adv_estimator)

    @property
    def variant(self) -> VariantSpec:
        """The spec of `pg_variant`. For a user's `module:function` it has only the defaults of
        VariantSpec."""
        return PG_VARIANTS.get(self.pg_variant, VariantSpec())


Ability = Literal[
    "critic", "lora", "gradient_checkpointing", "streamed_parts", "kept_ids", "fp32", "bf16", "fp16"
]
"""What a role may ask of the strategy that trains or runs its model: a value head, adapters, activations that
are computed again, an optimiser step in parts, log-probs over the kept ids of truncated sampling, a dtype of
matrix products."""


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """One `strategy_name`: what it is, and what it can't do. `extra` names the optional dependency that it
    needs; empty = none. `options` are the keys that its strategy_config may have; None = unknown."""

    kind: Literal["train", "forward", "sampling"]
    entry: str = ""
    extra: str = ""
    options: tuple[str, ...] | None = None
    set_elsewhere: tuple[str, ...] = ()
    """Options of the engine that follow from other settings, so strategy_config may not have them."""
    has_options: bool = True
    """Whether it reads strategy_config in this version."""
    is_sharded: bool = False
    """Whether each rank holds only a share of what is trained, so that no server can read the weights in
    place, and all ranks take part in gathering them."""
    writes_shares: bool = False
    """Whether each rank writes its share of a checkpoint."""
    divides_layers: bool = False
    """Whether its tensor- and pipeline-parallel sizes say among how many ranks a model is divided."""
    gpu_library: str = ""
    """The module of a library whose kernels it needs on a GPU, beside its extra; empty = none."""
    needs_all_processes: bool = False
    """Whether a role must be on all processes of the run."""
    shares_all_devices: bool = False
    """Whether two roles of this strategy that have a device in common must have all in common."""
    always_packs: bool = False
    """Whether it packs samples whatever `use_sequence_packing` says."""
    lacks: Mapping[Ability, str] = field(default_factory=dict)
    """What it can't do, and why."""
    reads_trainer: bool = False
    """Whether this server reads the weights of a trainer in its process without a copy."""
    packs_weights: bool = False
    """Whether this server copies small fp32 models into its kernels' memory layout on a CPU."""
    instead: str = ""
    """If it isn't available: the strategy that does the same, and how."""
    attaches_by: str = ""
    """The option that names a server which runs already, so that its library needn't be installed; empty =
    none."""

    @property
    def is_available(self) -> bool:
        return bool(self.entry)

    @property
    def limits_cache(self) -> bool:
        """Whether `kv_cache_bytes` bounds the server's KV cache."""
        return "kv_cache_bytes" in (self.options or ())


ROWS_TAG = "data"
"""The tag under which rows of a data set appear where environments are listed by tag."""


@dataclass(frozen=True, slots=True)
class TrackerSpec:
    """One name of `track_with`. `target` is its class. `arguments` are those that a config may give; None =
    any."""

    target: str = ""
    arguments: Mapping[str, Literal["str", "dict"]] | None = None
    extra: str = ""
    """The extra that installs its library; both have the same name."""
    offline: str = ""
    """The argument, as a config writes it, with which the tracker needs neither network nor login; empty =
    none."""


MLFLOW_OF_TRACES = "3.17"
"""The version of MLflow whose inner client of traces `tracking/mlflow_traces.py` is written for."""

_TABLES = read_table(__file__, "spec.yaml")
ESTIMATORS = TypeAdapter(dict[str, EstimatorSpec]).validate_python(_TABLES["estimators"])
PG_VARIANTS = TypeAdapter(dict[str, VariantSpec]).validate_python(_TABLES["pg_variants"])
STRATEGIES = TypeAdapter(dict[str, StrategySpec]).validate_python(_TABLES["strategies"])
TRACKERS = TypeAdapter(dict[str, TrackerSpec]).validate_python(_TABLES["trackers"])
TOOL_PARSERS: dict[str, str] = _TABLES["tool_parsers"]
REWARDS: dict[str, str] = _TABLES["rewards"]
CHECKED_REWARDS = ("accuracy", "length_penalty", "step", "combined")
"""Rewards that compare answers by the checker of `data.checker`."""
AGENTS: dict[str, str] = _TABLES["agents"]
AGENT_ALIASES: dict[str, str] = _TABLES["agent_aliases"]
TOOL_AGENTS = ("tool_agent", "react_agent")
"""The registered agents whose prompts show the tools of a row."""
ROW_AGENTS = ("single_turn_agent", *TOOL_AGENTS)
"""The registered agents that play rows of a data set instead of environments."""
ENVS: dict[str, str] = _TABLES["envs"]
TOOLS: dict[str, str] = _TABLES["tools"]
TOOL_ALIASES: dict[str, str] = _TABLES["tool_aliases"]
INTERACTIONS: dict[str, str] = _TABLES["interactions"]
INTERACTION_ALIASES: dict[str, str] = _TABLES["interaction_aliases"]

MAX_KEPT = 256
"""A server returns the candidate ids of each token only if `top_k` is at most this number."""
OWN_TRANSFER = "weight_transfer_config"
"""The option of an engine by which its own processes receive the weights: vLLM's, which SGLang gets too. Its
value is `{backend: NAME}`."""
KV_CACHE_BYTES = 2**30
"""Default size limit in bytes of the KV cache of the embedded server, and of vLLM on a CPU."""
MAX_PACKED_BYTES = 2**28
"""On a CPU the embedded server copies float32 models of up to this many bytes into its kernels' memory
layout."""

ContextMode = Literal["trajectory", "step"]
MatchRule = Literal["omitted", "exact"]
"""One growing context per episode, or a fresh one each turn."""

ANSWER_PATTERN = r"<answer>(.*?)</answer>"
THINK_ANSWER_PATTERN = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
DEFAULT_ACTION_PATTERN = ANSWER_PATTERN
"""Default `action_pattern` of an environment tag."""
DEFAULT_SYSTEM_TEMPLATE: str = _TABLES["templates"]["system"]
DEFAULT_TURN_TEMPLATE: str = _TABLES["templates"]["turn"]
DEFAULT_STEP_TEMPLATE: str = _TABLES["templates"]["step"]
TURN_PLACEHOLDERS = (
    "observation",
    "turn_idx",
    "actions_left",
    "max_response_length",
    "env_instruction",
    "suffix",
)
"""Placeholders of an `agent_template`."""
STEP_PLACEHOLDERS = ("history", "history_length", "step_count", "current_step", "current_observation")
"""Further placeholders if each turn has a fresh context (`mode: step`)."""
