"""Torch-free facts that the config and the registries share: names, parameters with defaults, what each needs.

A name is *available* when this version implements it. A valid name that isn't passes `turnwise config` and is refused by
`turnwise train` with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class EstimatorSpec:
    """One `adv_estimator`.

    `entry` is `module:Class` of the Algorithm, empty where it isn't available. `placement` is the default
    `reward_placement`: `score` means that the estimator works on trajectory scores. `normalization` is the default
    `(grouping, method)`; `own` estimators define their own and refuse `reward_normalization`.
    """

    entry: str = ""
    needs: frozenset[str] = frozenset()
    placement: Literal["turn", "final", "score"] = "score"
    normalization: tuple[str, str] | Literal["own"] = ("batch", "identity")
    paper: str = ""

    @property
    def is_available(self) -> bool:
        return bool(self.entry)


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One `pg_variant`: its `pg_args` with defaults, and the `loss_agg_mode` that it uses unless told otherwise."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "token-mean"
    is_available: bool = False


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """One `strategy_name`. `extra` names the optional dependency that it needs; empty = none."""

    kind: Literal["train", "forward", "sampling"]
    entry: str = ""
    extra: str = ""

    @property
    def is_available(self) -> bool:
        return bool(self.entry)


_GROUP = ("traj_group_id", "mean_std")

ESTIMATORS: dict[str, EstimatorSpec] = {
    "gae": EstimatorSpec(needs=frozenset({"values"}), placement="turn", paper="Schulman et al. 2016, arXiv:1506.02438"),
    "reinforce": EstimatorSpec(placement="turn", paper="Williams 1992"),
    "grpo": EstimatorSpec("turnwise.algorithms.grpo:GRPO", normalization=_GROUP, paper="Shao et al. 2024, arXiv:2402.03300"),
    "rloo": EstimatorSpec(normalization="own", paper="Ahmadian et al. 2024, arXiv:2402.14740"),
    "reinforce_plus_plus": EstimatorSpec(placement="final", paper="Hu 2025, arXiv:2501.03262"),
    "reinforce_plus_plus_baseline": EstimatorSpec(normalization="own", paper="Hu 2025, arXiv:2501.03262"),
    "agentic_reinforce": EstimatorSpec(placement="turn"),
    "step_reinforce": EstimatorSpec(placement="turn", normalization=_GROUP),
    "gigpo": EstimatorSpec(normalization=_GROUP, paper="Feng et al. 2025, arXiv:2505.10978"),
    "opo": EstimatorSpec(normalization="own", paper="Hao et al. 2025, arXiv:2505.23585"),
    "grpo_passk": EstimatorSpec(normalization="own", paper="Tang et al. 2025, arXiv:2503.19595"),
    "gpg": EstimatorSpec(normalization="own", paper="Chu et al. 2025, arXiv:2504.02546"),
    "remax": EstimatorSpec(
        needs=frozenset({"greedy_sibling"}), placement="final", normalization="own", paper="Li et al. 2023, arXiv:2310.10505"
    ),
}

_CLIP = {"clip_low": 0.2, "clip_high": 0.2}

PG_VARIANTS: dict[str, VariantSpec] = {
    "ppo": VariantSpec({**_CLIP, "dual_clip": 3.0}, is_available=True),
    "gspo": VariantSpec({"clip_low": 3e-4, "clip_high": 4e-4}, "seq-mean-token-mean"),
    "gmpo": VariantSpec({"clip_low": 0.4, "clip_high": 0.4}, "seq-mean-token-mean"),
    "cispo": VariantSpec(dict(_CLIP)),
    "sapo": VariantSpec({"tau_positive": 1.0, "tau_negative": 1.05}),
    "vanilla": VariantSpec(),
    "tis": VariantSpec({"cap": 2.0}),
    "topr": VariantSpec({"weight_positive": 1.0, "weight_negative": 1.0}),
    "kimi15": VariantSpec({"tau": 0.1}),
    "clip_cov": VariantSpec({**_CLIP, "fraction": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0}),
    "kl_cov": VariantSpec({"fraction": 2e-4, "coef": 1.0}),
}

STRATEGIES: dict[str, StrategySpec] = {
    "torch_train": StrategySpec("train", "turnwise.training.torch_strategy:TorchStrategy"),
    "fsdp2_train": StrategySpec("train"),
    "deepspeed_train": StrategySpec("train", extra="deepspeed"),
    "megatron_train": StrategySpec("train", extra="megatron"),
    "torch_infer": StrategySpec("forward", "turnwise.training.torch_strategy:TorchStrategy"),
    "fsdp2_infer": StrategySpec("forward"),
    "deepspeed_infer": StrategySpec("forward", extra="deepspeed"),
    "megatron_infer": StrategySpec("forward", extra="megatron"),
    "embedded": StrategySpec("sampling", "turnwise.inference.embedded.server:EmbeddedServer"),
    "hf": StrategySpec("sampling", "turnwise.inference.hf_server:HFServer"),
    "vllm": StrategySpec("sampling", extra="vllm"),
    "sglang": StrategySpec("sampling", extra="sglang"),
}

AGENTS: dict[str, str] = {
    "env_agent": "turnwise.agents.env_agent:EnvAgent",
    "single_turn_agent": "",
    "tool_agent": "",
    "react_agent": "",
}
AGENT_ALIASES: dict[str, str] = {
    "tool_agent_loop": "tool_agent",
    "RectAgentLoop": "react_agent",
    "ReactAgentLoop": "react_agent",
}

ENVS: dict[str, str] = {"frozen_lake": "turnwise.envs.frozen_lake:FrozenLakeEnv", "sokoban": "", "webshop": ""}
"""Built-in `env_type`s; others are registered at run time or named `module:Class`."""

TRACKERS: dict[str, str] = {"tensorboard": "", "stdout": "", "wandb": "wandb", "swanlab": "swanlab", "mlflow": "mlflow"}
"""`track_with` names and the distribution each needs."""
AVAILABLE_TRACKERS: frozenset[str] = frozenset({"tensorboard", "stdout"})
