"""The visible effect of each setting: which value to set, in which config, and where to look.

`tests/contracts/test_every_setting.py` runs every line; a setting without one must be refused, or answered
with a sentence, wherever it is set. Values that start with `$` are paths of the test's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

PLACES: dict[str, str] = {
    "weights": "the trained weights",
    "credit": "the advantages of the rollouts",
    "rollouts": "what is played and sampled",
    "rewards": "the rewards of whole episodes",
    "validation": "the validation metrics",
    "metrics": "the metrics",
    "files": "the files that are written",
    "traces": "the traces of episodes",
    "log": "the log",
    "output": "the terminal",
    "error": "the error that ends the run, which names it",
    "calls": "the passes of the model and their micro-batches, not the result",
    "episodes": "how many episodes are played, and steps of environments taken, at once",
    "table": "the table at the start, not the result",
}
"""Where the effect of a setting can be seen."""
SAME_RESULT = ("calls", "table")
"""Places of settings that by design change speed and memory alone."""


@dataclass(frozen=True, slots=True)
class Live:
    """A setting in force: set to `value` in a config with the changes of `under`, another thing is seen in
    `place`."""

    key: str
    value: Any
    place: str
    under: Mapping[str, Any] = field(default_factory=dict)


def _roles(roles: str, lines: tuple[Live, ...], **under: Mapping[str, Any]) -> Iterator[Live]:
    """The lines for several sections, each with the changes that bring that section into force. A key of a
    line's `under` that begins with a dot is the section's own."""
    for role in roles.split():
        for line in lines:
            inner = {
                f"{role}.{key.removeprefix('.')}" if key.startswith(".") else key: v
                for key, v in line.under.items()
            }
            yield Live(f"{role}.{line.key}", line.value, line.place, {**under.get(role, {}), **inner})


_LR = "actor_train.training_args.learning_rate"
_REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.5}
_TWO = {"max_steps": 2}
_PENALTY = _TWO | {"add_token_level_kl": True, "init_kl_coef": 0.5}
"""In the second step the policy has left the reference."""
_TRACED = {"trace.backend": "jsonl"}
_LENGTHS = {"sequence_length": None, "prompt_length": 20, "response_length": 16}
_CLIPS = {"use_pg_clip_range": True, "pg_clip_low": 0.001, "pg_clip_high": 0.002}
_STALE = _TWO | {"actor_train.model_update_frequency": 2, _LR: 0.03}
"""The second batch is sampled from weights that training has left behind."""
_WEIGHTED = _STALE | {"train_infer_correction.is_weight.enabled": True}
_FILTERED = _STALE | {
    "train_infer_correction.filters.ratio_low": 0.9,
    "train_infer_correction.filters.ratio_high": 1.1,
}
_GAE = {
    "adv_estimator": "gae",
    "critic.training_args.learning_rate": 0.01,
    "critic.training_args.per_device_train_batch_size": 2,
}
_GIGPO = {"adv_estimator": "gigpo"}
_SLOW = {
    "custom_envs.<tag>.env_type": "odd_envs:SlowEnv",
    "custom_envs.<tag>.env_config": {"delay_s": 0.02},
    "train_env_manager.max_env_retries": 0,
    "val_env_manager.max_env_retries": 0,
}
_AHEAD = {"async_generation_ratio": 1}
_VALIDATED = {"eval_steps": 2}
_STOPPED = {"eval_steps": 1, "max_steps": 3, "early_stopping.patience": 1}
_SAMPLED = {"train_env_manager.generating_args.do_sample": True}
_BLOCKING = {"custom_envs.<tag>.env_config": {"delay_s": 0.005}}
_ALIKE = {"custom_envs.<tag>.env_type": "toy_envs:BanditEnv", "custom_envs.<tag>.env_config": {}}
_RAISING = {"custom_envs.<tag>.env_type": "odd_envs:RaisingEnv", "custom_envs.<tag>.env_config": {}}

_ROWS = {
    "train_env_manager.tags": ["data"],
    "data.train_files": ["$rows"],
    "data.reward.name": "toy_rewards:length",
}
_VAL_ROWS = _ROWS | {"val_env_manager.tags": ["data"], "data.val_files": ["$rows"]} | _VALIDATED
_TOOLS = _ROWS | {
    "data.default_agent": "toy_rewards:TellsTools",
    "agent.tool_config_path": "$tools",
    "agent.tool_parser": "hermes",
}
_GATEWAY = _ROWS | {"data.default_agent": "gateway", "agent.play": "http_players:two_turns"}
_WISHFUL = _GATEWAY | {"agent.play": "http_players:wishful"}
_COMMAND = _ROWS | {"data.default_agent": "gateway", "agent.command": ["python3", "$http_command"]}
_MISTAKEN = _GATEWAY | {
    "agent.play": "http_players:mistaken",
    "agent.mistakes": ["http_players:Mistake"],
}
_SCORED = {"data.reward.name": "reward_model", "reward_pretrain": "$score_model"}

RUN = (
    Live("pretrain", "$other_model", "weights"),
    Live("template_kwargs", {"unread": 1}, "error"),
    Live("exp_name", "other", "files"),
    Live("seed", 7, "weights"),
    Live("output_dir", "elsewhere", "files"),
    Live("logging_dir", "logs", "files"),
    Live("save_steps", 1, "files", _TWO),
    Live("max_ckpt_to_keep", 1, "files", _TWO | {"save_steps": 1}),
    Live("checkpoint_config.output_dir", "saved", "files"),
    Live("track_with", ["tensorboard"], "files"),
    Live("tracker_kwargs", {"log_dir": "elsewhere"}, "files", {"track_with": ["tensorboard"]}),
    Live("logging_steps", 2, "output", {"track_with": ["stdout"], "max_steps": 3}),
    Live("cluster.name", "launched", "error"),
    Live("cluster.address", "auto", "error"),
    Live("max_steps", 2, "metrics"),
    Live("max_grad_norm", 1e-6, "weights"),
    Live("deterministic", True, "table"),
    Live("resume_from_checkpoint", "$checkpoint", "files", {"max_steps": 3}),
)
"""The keys that both kinds of config have."""

_PICKLED = Live("model_args.allow_pickle", True, "log", {".model_args.model_name_or_path": "$pickled_model"})
_CODED = Live("model_args.trust_remote_code", True, "log", {".model_args.model_name_or_path": "$coded_model"})

_TRAINING = (
    Live("training_args.learning_rate", 0.002, "metrics"),
    Live("training_args.weight_decay", 0.5, "weights"),
    Live("training_args.warmup_steps", 3, "metrics", _TWO),
    Live("training_args.warmup_ratio", 0.5, "metrics"),
    Live("training_args.lr_scheduler_type", "linear", "metrics"),
    Live("training_args.adam_beta1", 0.5, "weights"),
    Live("training_args.adam_beta2", 0.5, "weights"),
    Live("training_args.per_device_train_batch_size", 1, "metrics"),
    Live("training_args.gradient_accumulation_steps", 2, "metrics"),
    Live("model_args.model_name_or_path", "$other_model", "weights"),
    Live("model_args.dtype", "bf16", "weights"),
    Live("model_args.attn_implementation", "sdpa", "table"),
    Live("model_args.disable_gradient_checkpointing", False, "table"),
    Live("model_args.freeze_module_prefix", ["model.embed_tokens"], "weights"),
    _PICKLED,
)
"""The settings of a role that is trained."""

_RANK = {".model_args.lora_rank": 2}
_ADAPTERS = (
    Live("model_args.lora_rank", 2, "weights"),
    Live("model_args.lora_alpha", 32.0, "weights", _RANK),
    Live("model_args.lora_dropout", 0.5, "weights", _RANK),
    Live("model_args.lora_target", ["q_proj"], "weights", _RANK),
)
"""The LoRA settings of a policy or a critic."""

_ONE_EACH = {".training_args.per_device_train_batch_size": 1, ".training_args.gradient_accumulation_steps": 2}
_FORWARD = (
    Live("use_dynamic_batching_in_infer", True, "calls", _ONE_EACH),
    Live("max_tokens_per_microbatch_in_infer", 40, "calls", {".use_dynamic_batching_in_infer": True}),
)
_BATCHING = (
    *_FORWARD,
    Live("use_dynamic_batching_in_train", True, "calls", _ONE_EACH),
    Live("max_tokens_per_microbatch_in_train", 40, "calls", {".use_dynamic_batching_in_train": True}),
)

_SAMPLING = (
    Live("generating_args.max_new_tokens", 2, "rollouts"),
    Live("generating_args.temperature", 0.5, "rollouts"),
    Live("generating_args.top_p", 0.5, "rollouts"),
    Live("generating_args.top_k", 3, "rollouts"),
    Live("generating_args.min_p", 0.9, "rollouts"),
    Live("generating_args.repetition_penalty", 3.0, "rollouts"),
    Live("generating_args.stop_strings", ["e"], "rollouts"),
)

_FAILURES = (
    Live("max_env_retries", 0, "log", _RAISING),
    Live("max_failed_fraction", 0.9, "error", _RAISING | {".max_env_retries": 0}),
    Live("env_step_timeout_s", 0.001, "error", _SLOW),
    Live("episode_timeout_s", 0.001, "error", _SLOW),
)

AGENTIC: tuple[Live, ...] = (
    *RUN,
    Live(
        "checkpoint_config.save_hf_model",
        True,
        "files",
        _TWO | {"save_steps": 1, "actor_train.strategy_args.strategy_name": "fsdp2_train"},
    ),
    Live("sequence_length", 24, "rollouts"),
    Live("prompt_length", 14, "rollouts", _LENGTHS),
    Live("response_length", 10, "rollouts", _LENGTHS),
    Live("eval_steps", 1, "validation"),
    Live("turn_journal_mb", 1, "files"),
    Live("trace.backend", "jsonl", "files"),
    Live("trace.token2text", True, "traces", _TRACED),
    Live("trace.max_samples_per_step", 1, "traces", _TRACED),
    Live("record_token_values", ["old", "ref", "entropy"], "rollouts"),
    Live("record_validation", True, "files", _VALIDATED),
    Live("save_best.metric", "val/score/max", "files", _VALIDATED),
    Live(
        "save_best.mode",
        "min",
        "metrics",
        _VALIDATED | {"eval_steps": 1, "save_best.metric": "val/score/mean"},
    ),
    Live("early_stopping.metric", "val/num_episodes", "metrics", _STOPPED),
    Live("early_stopping.mode", "min", "metrics", _STOPPED),
    Live(
        "early_stopping.patience",
        1,
        "metrics",
        {"eval_steps": 1, "max_steps": 3, "early_stopping.min_delta": 9.0},
    ),
    Live("early_stopping.min_delta", 9.0, "metrics", _STOPPED),
    Live("rollout_batch_size", 2, "metrics"),
    Live("val_batch_size", 1, "validation", _VALIDATED),
    Live("render_save_dir", "pictures", "files", _VALIDATED),
    Live("show_metrics", ["num_actions"], "output", {"track_with": ["stdout"]}),
    *(
        Live(f"deadlines.{name}", 1e-9, "error")
        for name in ("request_s", "start_s", "env_s", "train_s", "weights_s")
    ),
    Live("parity_max_logprob_diff", 1e-12, "error"),
    Live("async_generation_ratio", 1, "metrics", _TWO),
    Live("on_weight_update", "abort_continue", "table", _AHEAD),
    Live("stale_groups", "drop", "table", _AHEAD),
    Live(
        "stream_training",
        False,
        "table",
        _AHEAD | {"actor_train.training_args.gradient_accumulation_steps": 2},
    ),
    Live("cpu_split.train", 3, "table", _AHEAD),
    Live("cpu_split.rollout", 3, "table", _AHEAD),
    # The algorithm
    Live("adv_estimator", "gae", "credit"),
    Live("gamma", 0.5, "credit", _GAE),
    Live("lambd", 0.5, "credit", _GAE),
    Live("gae_granularity", "turn", "credit", _GAE),
    Live(
        "bootstrap_on_truncation",
        False,
        "credit",
        _GAE | _TWO | {"custom_envs.<tag>.env_type": "odd_envs:CutEnv"},
    ),
    Live("value_clip", 1e-4, "weights", _GAE),
    Live("critic_warmup", 1, "weights", _GAE | _TWO),
    Live("reward_placement", "final", "credit", {"adv_estimator": "reinforce"}),
    Live("whiten_rewards", True, "credit", _GAE),
    Live("episode_reward_weight", 0.5, "credit", _GIGPO),
    Live("step_reward_weight", 0.5, "credit", _GIGPO),
    Live("step_reward_gamma", 0.5, "credit", _GIGPO),
    Live("reward_pretrain", "$other_model", "credit", _GAE | _TWO),
    Live("pg_variant", "gspo", "weights"),
    Live("pg_args", {"clip_low": 0.001}, "weights"),
    Live("ratio_type", "segment", "weights"),
    Live("pg_clip", 0.001, "weights"),
    Live("use_pg_clip_range", True, "weights", {"pg_clip_low": 0.001}),
    Live("pg_clip_low", 0.1, "weights", _CLIPS),
    Live("pg_clip_high", 0.1, "weights", _CLIPS),
    Live("dual_clip_loss", False, "weights", {_LR: 0.1, "ppo_epochs": 3}),
    Live("ppo_epochs", 2, "weights"),
    Live("add_token_level_kl", True, "credit", _TWO | {"init_kl_coef": 0.5, "use_kl_loss": True}),
    Live("init_kl_coef", 0.1, "credit", _PENALTY),
    Live("kl_penalty", "k2", "credit", _PENALTY),
    Live("target_kl", 0.1, "metrics", _PENALTY),
    Live("kl_horizon", 10.0, "metrics", _PENALTY | {"target_kl": 0.1}),
    Live("use_kl_loss", True, "weights", {"kl_loss_coef": 0.5}),
    Live("kl_loss_coef", 0.1, "weights", _REFERENCE),
    Live("kl_loss_type", "k2", "weights", _REFERENCE),
    Live("reward_normalization.grouping", "batch", "credit"),
    Live("reward_normalization.method", "mean", "credit"),
    Live("reward_normalization.norm_mean_type", "batch", "credit"),
    Live("reward_normalization.norm_std_type", "batch", "credit"),
    Live("reward_clip", 0.1, "credit"),
    Live("group_filter", "non_zero_variance", "metrics", _ALIKE),
    Live("max_refill_factor", 1.0, "metrics", _ALIKE | {"group_filter": "non_zero_variance"}),
    Live("whiten_advantages", True, "credit"),
    Live("advantage_clip", 0.1, "credit"),
    Live("entropy_loss_coef", 0.01, "weights"),
    Live("target_entropy", 5.0, "weights", {"entropy_loss_coef": 0.01}),
    Live("loss_agg_mode", "seq-mean-token-sum", "weights"),
    Live("use_rollout_log_probs", True, "calls"),
    Live("train_infer_correction.is_weight.enabled", False, "weights", _WEIGHTED),
    Live("train_infer_correction.is_weight.weight_type", "sequence", "weights", _WEIGHTED),
    Live("train_infer_correction.is_weight.upper_bound", 0.7, "weights", _WEIGHTED),
    Live("train_infer_correction.filters.enabled", False, "weights", _FILTERED),
    Live("train_infer_correction.filters.agg_type", "sequence", "weights", _FILTERED),
    Live("train_infer_correction.filters.ratio_low", 0.99, "weights", _FILTERED),
    Live("train_infer_correction.filters.ratio_high", 1.01, "weights", _FILTERED),
    # Roles
    *_roles("actor_train", (*_TRAINING, *_ADAPTERS, *_BATCHING, _CODED)),
    Live("actor_train.device_mapping", [99], "error"),
    Live("critic.device_mapping", [99], "error", _GAE),
    Live("reference.device_mapping", [99], "error", _REFERENCE),
    Live("actor_infer.device_mapping", [99], "error", _AHEAD),
    Live("num_gpus_per_node", 1, "error", {"actor_train.device_mapping": [0, 1]}),
    Live("actor_train.model_update_frequency", 2, "metrics", _TWO),
    *_roles("actor_infer", _SAMPLING),
    Live("actor_infer.generating_args.do_sample", False, "validation", _VALIDATED | _SAMPLED),
    Live("actor_infer.model_args.dtype", "bf16", "rollouts"),
    Live("actor_infer.strategy_args.strategy_name", "hf", "rollouts"),
    Live("actor_infer.strategy_args.strategy_config", {"kv_cache_bytes": 1}, "error"),
    *_roles(
        "reference",
        (
            Live("model_args.model_name_or_path", "$other_model", "weights"),
            Live("model_args.dtype", "bf16", "weights"),
            Live("model_args.attn_implementation", "sdpa", "table"),
            Live("training_args.per_device_train_batch_size", 1, "calls"),
            *_FORWARD,
            _PICKLED,
            _CODED,
        ),
        reference=_REFERENCE,
    ),
    *_roles("critic", (*_TRAINING, *_ADAPTERS, *_BATCHING, replace(_CODED, place="error")), critic=_GAE),
    *_roles(
        "reward",
        (
            Live("model_args.model_name_or_path", "$other_score_model", "rewards"),
            Live("model_args.dtype", "bf16", "rewards"),
            Live("model_args.attn_implementation", "sdpa", "table"),
            Live("training_args.per_device_train_batch_size", 1, "calls"),
            *_FORWARD,
            replace(_CODED, place="error"),
        ),
        reward=_SCORED,
    ),
    # Rows and rewards
    Live("data.train_files", ["$other_rows"], "rollouts", _ROWS),
    Live("data.val_files", ["$other_rows"], "validation", _VAL_ROWS),
    Live("data.num_epochs", 1, "metrics", _ROWS | {"max_steps": 3}),
    Live("data.curriculum", True, "rollouts", _ROWS),
    Live("data.format", "sharegpt", "error", _ROWS),
    Live("data.on_bad_row", "skip", "log", _ROWS | {"data.train_files": ["$rows", "$demonstrations"]}),
    Live("data.prompt_key", "question", "rollouts", _ROWS),
    Live("data.agent_name_key", "asker", "rollouts", _ROWS),
    Live("data.default_agent", "toy_rewards:AskTwice", "rollouts", _ROWS),
    Live("data.reward.name", "exact_match", "rewards", _ROWS),
    Live("data.reward.weight", 0.5, "rewards", {"data.reward.name": "toy_rewards:length"}),
    Live("data.reward.args", {"power": 2.0}, "rewards", {"data.reward.name": "toy_rewards:length"}),
    Live("data.reward.form", "messages", "rewards", {"data.reward.name": "toy_rewards:length"}),
    Live("data.checker", "math_verify", "table", _ROWS | {"data.reward.name": "accuracy"}),
    Live("data.reward_timeout_s", 0.01, "error", {"data.reward.name": "toy_rewards:slow"}),
    Live("data.max_prompt_length", 24, "rollouts", _ROWS | _TWO),
    Live("data.shuffle", False, "rollouts", _ROWS),
    Live("agent.tools", ["toy_tools:greet"], "rollouts", _TOOLS),
    Live("agent.tool_config_path", "$other_tools", "rollouts", _TOOLS),
    Live("agent.function_tool_path", "$functions", "rollouts", _TOOLS),
    Live("agent.interaction_config_path", "$users", "rollouts", _TOOLS),
    Live("agent.agent_config_path", "nowhere.yaml", "error", _ROWS),
    Live("agent.graph", "nowhere:graph", "error", _ROWS),
    Live("agent.tool_parser", "toy_tools:NoParser", "error", _TOOLS),
    Live("agent.max_assistant_turns", 2, "rollouts", _TOOLS),
    Live("agent.max_user_turns", 2, "rollouts", _TOOLS | {"agent.interaction_config_path": "$users"}),
    Live("agent.max_parallel_calls", 2, "rollouts", _TOOLS),
    Live("agent.max_tool_response_length", 2, "rollouts", _TOOLS),
    Live("agent.tool_response_truncate_side", "left", "rollouts", _TOOLS),
    Live("agent.tool_timeout_s", 2.0, "rollouts", _TOOLS),
    Live("agent.play", "http_players:wishful", "rollouts", _GATEWAY),
    Live("agent.command", ["python3"], "error", _GATEWAY),
    Live("agent.environment", {"WORD": "red"}, "rollouts", _COMMAND),
    Live("agent.max_processes", 1, "table", _COMMAND),
    Live("agent.models", {"policy": "untrained"}, "error", _GATEWAY),
    Live("agent.grace_s", 1.0, "table", _GATEWAY),
    Live("agent.mistakes", ["http_players:post"], "error", _GATEWAY),
    Live("agent.mistake_reward", -1.0, "rewards", _MISTAKEN),
    Live("gateway.host", "0.0.0.0", "error", _GATEWAY),
    Live("gateway.port", 49731, "table", _GATEWAY),
    Live("gateway.public_url", "nowhere", "error", _GATEWAY),
    Live("gateway.match", "exact", "table", _GATEWAY),
    Live("gateway.strict", True, "error", _WISHFUL),
    Live("gateway.client_temperature", True, "rollouts", _WISHFUL),
    Live("gateway.max_requests", 2, "table", _GATEWAY),
    Live("gateway.max_n", 1, "error", _WISHFUL),
    Live("gateway.max_body_mb", 1, "table", _GATEWAY),
    Live("custom_envs.<tag>.agent_args", {"play": "nowhere:play"}, "error"),
    # Environments
    Live("custom_envs.<tag>.env_type", "toy_envs:BanditEnv", "rollouts"),
    Live("custom_envs.<tag>.env_config", {"num_turns": 1}, "rollouts"),
    Live("custom_envs.<tag>.max_steps", 1, "rollouts"),
    Live("custom_envs.<tag>.max_tokens_per_step", 2, "rollouts"),
    Live("custom_envs.<tag>.agent_name", "odd_envs:OneTurnAgent", "rollouts"),
    Live("custom_envs.<tag>.agent_system_template", "Be brief.", "rollouts"),
    Live("custom_envs.<tag>.agent_template", "{observation}!", "rollouts"),
    Live("custom_envs.<tag>.action_pattern", "(.)", "rollouts"),
    Live("custom_envs.<tag>.mode", "step", "rollouts"),
    Live(
        "custom_envs.<tag>.history_length",
        0,
        "rollouts",
        {"custom_envs.<tag>.mode": "step", "custom_envs.<tag>.agent_template": "{history}{observation}"},
    ),
    Live(
        "custom_envs.<tag>.encode_special_tokens",
        False,
        "rollouts",
        {"custom_envs.<tag>.agent_template": "<|im_end|>{observation}"},
    ),
    Live(
        "custom_envs.<tag>.use_thread_lock",
        True,
        "episodes",
        _BLOCKING | {"train_env_manager.max_env_num_per_worker": 2},
    ),
    *_roles("train_env_manager", (*_SAMPLING, *_FAILURES)),
    *_roles("val_env_manager", _FAILURES, val_env_manager=_VALIDATED),
    *(Live(f"val_env_manager.{line.key}", line.value, "validation", _VALIDATED | _TWO) for line in _SAMPLING),
    Live("val_env_manager.generating_args.do_sample", False, "validation", _VALIDATED),
    Live("train_env_manager.group_size", 4, "credit"),
    Live("train_env_manager.group_size_redundancy", 1, "episodes"),
    Live("val_env_manager.group_size", 2, "validation", _VALIDATED),
    *_roles(
        "train_env_manager val_env_manager",
        (
            Live("num_env_groups", 1, "episodes"),
            Live("max_env_num_per_worker", 2, "episodes", _BLOCKING),
            Live("tags", ["Other"], "metrics"),
            Live("num_groups_partition", [0, 2], "metrics", {".tags": ["<tag>", "Other"]}),
        ),
        val_env_manager=_VALIDATED,
    ),
)

_SFT_VALIDATED = {"eval_steps": 1, "val_files": "$demonstrations", "num_epochs": 3}

SFT: tuple[Live, ...] = (
    *RUN,
    Live(
        "checkpoint_config.save_hf_model",
        True,
        "files",
        _TWO | {"save_steps": 1, "strategy_args.strategy_name": "fsdp2_train"},
    ),
    Live("device_mapping", [99], "error"),
    Live("num_gpus_per_node", 1, "error", {"device_mapping": [0, 1]}),
    Live("sequence_length", 8, "error"),
    Live("eval_steps", 2, "metrics", {"val_files": "$demonstrations"}),
    Live("save_best.metric", "val/score/mean", "error"),
    Live("save_best.mode", "max", "files", _SFT_VALIDATED),
    Live("early_stopping.metric", "val/score/mean", "error"),
    Live("early_stopping.mode", "max", "metrics", _SFT_VALIDATED | {"early_stopping.patience": 1}),
    Live("early_stopping.patience", 1, "metrics", _SFT_VALIDATED | {"early_stopping.min_delta": 9.0}),
    Live("early_stopping.min_delta", 9.0, "metrics", _SFT_VALIDATED | {"early_stopping.patience": 1}),
    Live("train_files", "$other_demonstrations", "weights"),
    Live("data.format", "alpaca", "error"),
    Live("data.on_bad_row", "skip", "log", {"train_files": ["$spoilt_demonstrations"]}),
    Live("val_files", "$demonstrations", "metrics"),
    Live("num_epochs", 2, "weights"),
    Live("use_dynamic_batching_in_train", False, "calls", {"training_args.gradient_accumulation_steps": 2}),
    Live("max_tokens_per_microbatch_in_train", 30, "calls"),
    *(
        replace(line, under={key.lstrip("."): value for key, value in line.under.items()})
        for line in (*_TRAINING, *_ADAPTERS)
    ),
    replace(_CODED, under={"pretrain": "$coded_model"}),
)
