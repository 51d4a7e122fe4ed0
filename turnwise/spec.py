"""Torch-free facts that the config and the registries share: names, parameters with defaults, what each needs.

A name is *available* when this version implements it. `turnwise config` accepts a valid name that isn't available; `turnwise
train` refuses it with a sentence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import TypeAdapter

KLEstimator = Literal["k1", "abs", "k2", "k3"]
KL_ALIASES: dict[str, KLEstimator] = {"kl": "k1", "mse": "k2", "low_var": "k3"}
KL_LOSSES: tuple[KLEstimator, ...] = ("k3", "k2")
"""Estimators whose gradient is one of a KL: the expected gradient of k1 is zero, and abs estimates no KL."""

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
"""Default scores for the mean and the standard deviation of each method of `reward_normalization`."""

OldLogProbs = Literal["if_needed", "always", "rollouts"]
"""Where old log-probs come from: a forward pass if needed, always a forward pass, or the servers that sampled the tokens."""
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSS_AGG_MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)


@dataclass(frozen=True, slots=True)
class EstimatorSpec:
    """One `adv_estimator`, and which config keys affect it.

    `entry` is `module:Class` of the Algorithm. `placement` is the default
    `reward_placement`: `score` means that the estimator works on trajectory scores. `normalization` is the default
    `(grouping, method)`; `own` estimators define their own and refuse `reward_normalization`.
    """

    entry: str = ""
    needs: frozenset[str] = frozenset()
    placement: Literal["turn", "final", "score"] = "score"
    normalization: tuple[Grouping, NormalizationMethod] | Literal["own"] = ("traj_group_id", "identity")
    needs_mean: bool = False
    """It contradicts scores without a baseline."""
    compares_siblings: bool = False
    """Advantages come from siblings alone, so a group of one has none."""
    discounts: bool = False
    """Whether it reads `gamma`."""
    has_td_errors: bool = False
    """Whether it reads `lambd`, `gae_granularity` and `bootstrap_on_truncation`."""
    has_step_returns: bool = False
    """Whether it reads `step_reward_gamma`."""
    mixes_step_advantages: bool = False
    """Whether it reads `episode_reward_weight` and `step_reward_weight`."""
    mixes_groups: bool = False
    """Advantages of a group depend on other groups of its batch."""
    whitens_advantages: bool = False
    """It always whitens, so `whiten_advantages` adds nothing."""
    is_own: bool = False
    """A user's class, which may read anything."""
    paper: str = ""

    @classmethod
    def of_user(cls, entry: str) -> "EstimatorSpec":
        """A user's `module:Class`: nothing is known of it, so no key is called useless."""
        return cls(entry, discounts=True, has_td_errors=True, has_step_returns=True, mixes_step_advantages=True, is_own=True)


Granularity = Literal["token", "segment", "geometric", "sequence"]
"""The span of a probability ratio: a token; a turn or a sequence (geometric mean of their tokens' ratios); or the whole
sequence (product of the ratios)."""


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One `pg_variant`: its `pg_args` with defaults, and its default `loss_agg_mode`. `granularities` lists those its ratio can
    have, the default first; it is empty for a loss without a ratio.
    """

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
            return f"pg_variant {name} has no probability ratio; leave ratio_type out"
        return f"pg_variant {name} takes its ratio over a whole sequence; use segment for turns, or pg_variant ppo for tokens"


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """One `strategy_name`. `extra` names the optional dependency that it needs; empty = none. `options` are those that its
    strategy_config may have; None = nothing is known of them."""

    kind: Literal["train", "forward", "sampling"]
    entry: str = ""
    extra: str = ""
    options: tuple[str, ...] | None = None
    set_elsewhere: tuple[str, ...] = ()
    """Options of the engine that follow from other settings, and may not be in strategy_config."""
    freezes: bool = False
    """Whether running requests can stand still over a weight update (on_weight_update: keep)."""

    @property
    def is_available(self) -> bool:
        return bool(self.entry)


ESTIMATORS = TypeAdapter(dict[str, EstimatorSpec]).validate_python(
    yaml.safe_load(Path(__file__).with_name("estimators.yaml").read_text(encoding="utf-8"))
)

_CLIP = {"clip_low": 0.2, "clip_high": 0.2}

_BY_SEQUENCE: tuple[Granularity, ...] = ("geometric", "segment")

PG_VARIANTS: dict[str, VariantSpec] = {
    "ppo": VariantSpec({**_CLIP, "dual_clip": 3.0}, paper="Schulman et al. 2017, arXiv:1707.06347"),
    "gspo": VariantSpec(
        {"clip_low": 3e-4, "clip_high": 4e-4}, "seq-mean-token-mean", _BY_SEQUENCE, paper="Zheng et al. 2025, arXiv:2507.18071"
    ),
    "gmpo": VariantSpec(
        {"clip_low": 0.4, "clip_high": 0.4}, "seq-mean-token-mean", _BY_SEQUENCE, paper="Zhao et al. 2025, arXiv:2507.20673"
    ),
    "cispo": VariantSpec(dict(_CLIP), paper="MiniMax 2025, arXiv:2506.13585"),
    "sapo": VariantSpec({"tau_positive": 1.0, "tau_negative": 1.05}, paper="Gao et al. 2025, arXiv:2511.20347"),
    "vanilla": VariantSpec(granularities=(), paper="Williams 1992"),
    "tis": VariantSpec({"cap": 2.0}, paper="Ionides 2008"),
    "topr": VariantSpec({"weight_positive": 1.0, "weight_negative": 1.0}, paper="Le Roux et al. 2025, arXiv:2503.14286"),
    "kimi15": VariantSpec({"tau": 0.1}, granularities=(), paper="Kimi Team 2025, arXiv:2501.12599"),
    "clip_cov": VariantSpec(
        {**_CLIP, "fraction": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0},
        chooses_tokens=True,
        paper="Cui et al. 2025, arXiv:2505.22617",
    ),
    "kl_cov": VariantSpec({"fraction": 2e-4, "coef": 1.0}, chooses_tokens=True, paper="Cui et al. 2025, arXiv:2505.22617"),
}

STRATEGIES: dict[str, StrategySpec] = {
    "torch_train": StrategySpec("train", "turnwise.training.torch_strategy:TorchStrategy"),
    "fsdp2_train": StrategySpec("train"),
    "deepspeed_train": StrategySpec(
        "train",
        "turnwise.training.deepspeed_strategy:DeepSpeedStrategy",
        extra="deepspeed",
        set_elsewhere=(
            *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
            *("optimizer", "scheduler", "fp16", "bf16", "torch_autocast", "managed_gradient_accumulation"),
        ),
    ),
    "megatron_train": StrategySpec("train", extra="megatron"),
    "torch_infer": StrategySpec("forward", "turnwise.training.torch_strategy:TorchStrategy"),
    "fsdp2_infer": StrategySpec("forward"),
    "deepspeed_infer": StrategySpec("forward", extra="deepspeed"),
    "megatron_infer": StrategySpec("forward", extra="megatron"),
    "embedded": StrategySpec(
        "sampling",
        "turnwise.inference.embedded.server:EmbeddedServer",
        options=("max_concurrency", "kv_cache_bytes", "max_step_tokens"),
    ),
    "hf": StrategySpec("sampling", "turnwise.inference.hf_server:HFServer", options=()),
    "vllm": StrategySpec(
        "sampling",
        "turnwise.inference.vllm_server:VLLMServer",
        extra="vllm",
        set_elsewhere=("model", "trust_remote_code", "dtype", "logprobs_mode", "generation_config", "worker_extension_cls"),
        freezes=True,
    ),
    "sglang": StrategySpec(
        "sampling",
        "turnwise.inference.sglang_server:SGLangServer",
        extra="sglang",
        set_elsewhere=("model_path", "trust_remote_code", "dtype", "context_length"),
        freezes=True,
    ),
}

ROWS_TAG = "data"
"""The tag of a data set's rows among the tags of environments."""

REWARDS: dict[str, str] = {
    "exact_match": "turnwise.data.reward_functions:exact_match",
    "accuracy": "turnwise.data.math_rewards:accuracy",
    "length_penalty": "turnwise.data.math_rewards:length_penalty",
    "step": "turnwise.data.math_rewards:step",
    "format": "turnwise.data.math_rewards:format_reward",
    "combined": "turnwise.data.math_rewards:combined",
    "gsm8k": "turnwise.data.reward_functions:gsm8k",
    "judge": "turnwise.inference.judge:Judge",
    "reward_model": "",
}
"""Registered names of `data.reward`; others are `module:function`. `reward_model` is the model of the `reward` role."""

AGENTS: dict[str, str] = {
    "env_agent": "turnwise.agents.env_agent:EnvAgent",
    "single_turn_agent": "turnwise.agents.single_turn_agent:SingleTurnAgent",
    "tool_agent": "turnwise.agents.tool_agent:ToolAgent",
    "react_agent": "",
}
ROW_AGENTS = ("single_turn_agent", "tool_agent")
"""The registered agents that play rows of a data set; they play no environment."""
AGENT_ALIASES: dict[str, str] = {
    "tool_agent_loop": "tool_agent",
    "RectAgentLoop": "react_agent",
    "ReactAgentLoop": "react_agent",
}

TOOL_PARSERS: dict[str, tuple[str, str]] = {
    "mistral": ("turnwise.chat.tool_calls:MistralParser", "[TOOL_CALLS]"),
    "deepseek": ("turnwise.chat.tool_calls:DeepSeekParser", "<｜tool▁call▁begin｜>"),
    "gpt_oss": ("turnwise.chat.tool_calls:GptOssParser", "<|channel|>commentary"),
    "qwen3_coder": ("turnwise.chat.tool_calls:Qwen3CoderParser", "<function="),
    "hermes": ("turnwise.chat.tool_calls:HermesParser", "<tool_call>"),
    "llama3_json": ("turnwise.chat.tool_calls:Llama3JsonParser", """{"name": "' + """),
    "python_tag": ("turnwise.chat.tool_calls:PythonTagParser", ""),
}
"""The forms of tool calls: a class of `protocols.ToolCallParser`, and the text in a chat template that tells the form; the
first that is found holds. Nothing tells `python_tag` from `llama3_json`, so it must be asked for."""

TOOLS: dict[str, str] = {
    "calculator": "turnwise.tools.calculator:calculator",
    "calc_gsm8k_reward": "turnwise.tools.gsm8k:Gsm8kTool",
    "python": "turnwise.tools.python_tool:PythonTool",
    "search": "turnwise.tools.search:SearchTool",
    "mcp": "turnwise.tools.mcp_server:McpServer",
}
"""Registered tools, classes of `protocols.Tool` or functions. A tool file names others `module:Class` or `module:function`."""
TOOL_ALIASES: dict[str, str] = {"verl.tools.gsm8k_tool.Gsm8kTool": "calc_gsm8k_reward"}
"""`class_name` of a published tool file → our name."""

INTERACTIONS: dict[str, str] = {
    "gsm8k": "turnwise.tools.gsm8k:Gsm8kInteraction",
    "model": "turnwise.inference.model_user:ModelUser",
}
"""Registered simulated users, classes of `protocols.Interaction`. An interaction file names others `module:Class`."""
INTERACTION_ALIASES: dict[str, str] = {"verl.interactions.gsm8k_interaction.Gsm8kInteraction": "gsm8k"}
"""`class_name` of a published interaction file → our name."""

ENVS: dict[str, str] = {
    "frozen_lake": "turnwise.envs.frozen_lake.env:FrozenLakeEnv",
    "sokoban": "turnwise.envs.sokoban.env:SokobanEnv",
    "gymnasium": "turnwise.envs.gymnasium.env:GymnasiumEnv",
    "textarena": "turnwise.envs.textarena_env:TextArenaEnv",
    "reasoning_gym": "turnwise.envs.reasoning_gym_env:ReasoningGymEnv",
    "webshop": "",
}
"""Built-in `env_type`s; others are registered at run time or named `module:Class`."""


@dataclass(frozen=True, slots=True)
class TrackerSpec:
    """One name of `track_with`. `target` is its class; `arguments` None passes on what it is given."""

    target: str = ""
    arguments: Mapping[str, type] | None = None
    extra: str = ""
    """The extra that installs its library, which is called the same."""
    offline: str = ""
    """Arguments with which it needs neither network nor login."""


TRACKERS: dict[str, TrackerSpec] = {
    "tensorboard": TrackerSpec("turnwise.tracking.tensorboard:TensorBoardStore", {"log_dir": str}),
    "stdout": TrackerSpec(arguments={}),
    "wandb": TrackerSpec("turnwise.tracking.wandb_store:WandbStore", extra="wandb", offline="mode: offline"),
    "swanlab": TrackerSpec("turnwise.tracking.swanlab_store:SwanlabStore", extra="swanlab", offline="mode: offline"),
    "mlflow": TrackerSpec(
        "turnwise.tracking.mlflow_store:MlflowStore",
        {"tracking_uri": str, "experiment_name": str, "run_name": str, "artifact_location": str, "tags": dict},
        extra="mlflow",
        offline="tracking_uri: 'sqlite:///mlflow.db'",
    ),
}

MAX_KEPT = 256
"""Ids that a token may have been drawn from, for a server to return them: `top_k` must bound them."""
KV_CACHE_BYTES = 2**30
"""Default bound of the embedded server's cache."""
MAX_PACKED_BYTES = 2**28
"""The largest float32 model that the embedded server copies into its kernels' memory layout on a CPU."""

ContextMode = Literal["trajectory", "step"]
"""One growing context per episode, or a fresh one each turn."""

ANSWER_PATTERN = r"<answer>(.*?)</answer>"
THINK_ANSWER_PATTERN = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
DEFAULT_ACTION_PATTERN = ANSWER_PATTERN
"""`action_pattern` of an environment tag."""
DEFAULT_SYSTEM_TEMPLATE = "You act in an environment, one action each turn. Read what you see and choose your next action."
DEFAULT_TURN_TEMPLATE = (
    "Turn {turn_idx}:\n{observation}\n{suffix}You have {actions_left} actions left. "
    "Give your next action as <answer>action</answer>, in at most {max_response_length} tokens."
)
DEFAULT_STEP_TEMPLATE = (
    "Earlier steps ({history_length} of {step_count}):\n{history}\n\nStep {current_step}:\n{current_observation}\n{suffix}"
    "You have {actions_left} actions left. Give your next action as <answer>action</answer>, in at most {max_response_length} "
    "tokens."
)
"""`agent_template` in mode `step`."""
TURN_PLACEHOLDERS = ("observation", "turn_idx", "actions_left", "max_response_length", "env_instruction", "suffix")
"""Placeholders of an `agent_template`."""
STEP_PLACEHOLDERS = ("history", "history_length", "step_count", "current_step", "current_observation")
"""Further placeholders if each turn has a fresh context (`mode: step`)."""
