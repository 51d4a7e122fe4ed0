"""Keys of the published files that have no counterpart here, with the reason that a user is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Retired:
    """Why a key isn't needed. `harmless` values are dropped silently; others with a note (`nothing to do`: what they ask for
    happens anyway, or can't matter), with a warning, or they are refused."""

    reason: str
    answer: Literal["nothing to do", "warn", "refuse", "refuse own classes"] = "warn"
    harmless: tuple[Any, ...] = ()
    idle: tuple[str, ...] = ()
    """There is nothing to do for a mapping all of whose keys start with one of these."""

    def is_idle(self, value: Any) -> bool:
        if self.idle and isinstance(value, dict):
            return all(str(key).startswith(self.idle) for key in value)
        return self.answer in ("nothing to do", "refuse own classes")

    def is_harmless(self, value: Any) -> bool:
        return any(type(value) is type(known) and value == known for known in self.harmless)

    def is_refused(self, value: Any) -> bool:
        if self.answer == "refuse own classes":
            return not str(value).startswith("roll.")
        return self.answer == "refuse"


VARIABLES = frozenset(
    {
        "action_pattern",
        "think_action_pattern",
        "all_response_pattern",
        "max_tokens_per_step",
        "max_actions_per_traj",
        "default_history_length",
        "sokoban_format_penalty",
        "frozen_format_penalty",
        "env_manager_cls",
        "agent_runner_cls",
        "custom_env",
        "agent_system_template",
        "agent_template",
        "pre_step_template",
        "next_step_template",
        "single_prompt_agent_system_template",
        "single_prompt_agent_template",
        "math_agent_system_template",
        "math_agent_template",
        "qa_agent_system_template",
        "qa_agent_template",
        "code_agent_system_template",
        "code_agent_template",
        "game_agent_system_template",
        "game_agent_template",
        "gem_math",
        "gem_qa",
        "gem_code",
        "gem_games",
        "gem_rg",
        "model_name",
        "agent_config_common",
    }
)
"""Top-level names that the published files use for interpolation only."""

_DISTILLATION = Retired("on-policy distillation isn't part of turnwise.", "refuse", harmless=(False, "rlvr", "agentic"))
_DEVICES = Retired("devices follow from each role's device_mapping.", "nothing to do")
_OTHER_PIPELINE = Retired("it belongs to the published single-turn pipeline.", harmless=(False,))
_PROFILER = Retired("use a profiler such as py-spy or torch.profiler around `turnwise train`.", harmless=(False,))
_OFFLOAD = Retired("what is offloaded, and how weights travel, follows from the placement of the roles.", harmless=(False,))
_NEVER_READ = Retired("nothing ever read it.", "nothing to do", harmless=(False,))
_ROUTER = Retired("a conversation always stays on its replica and a new one goes to the least busy.", "nothing to do")
_SYSTEM_ENVS = Retired(
    "set environment variables in the shell that starts turnwise.", harmless=({},), idle=("USE_MODELSCOPE", "RAY_", "ROLL_")
)
_WORKER_CLASS = Retired(
    "workers follow from strategy_name and the loss from pg_variant; your own loss is pg_variant: module:function.",
    "refuse own classes",
)
_PROXY = Retired(
    "models are always sampled through actor_infer; `turnwise play` drives an environment with another model.",
    "refuse",
    harmless=({"proxy_type": "policy"}, {"proxy_type": "policy", "proxy_config": {}}),
)
_SCHEDULE = Retired("steps and seeds are the pipeline's (max_steps, seed).")
_PRECISION = Retired("the precision is model_args.dtype.", harmless=(False,))
_BEAMS = Retired("tokens are sampled, never searched for with beams.", "refuse", harmless=(1, 1.0))
_LOGPROBS = Retired("the log-prob of every sampled token is always returned.", "nothing to do")
_OLD_LOGPROBS = Retired(
    "old log-probs are recomputed unless a ratio of 1 is exactly true; use_rollout_log_probs takes the sampler's.",
    harmless=(False,),
)
_MICRO_BATCH = Retired(
    "forward passes use per_device_train_batch_size, or use_dynamic_batching_in_infer, with the same result.", "nothing to do"
)
_WORKER = Retired("workers and their limits follow from device_mapping, strategy_config and deadlines.", "nothing to do")
_IMAGES = Retired("images in observations aren't in this version.", "refuse")
_RUNNER = Retired(
    "agent runners aren't in this version; write an agent loop and name it in agent_name: module:Class.", "refuse"
)
_PACKING = Retired("samples are always packed (use_sequence_packing).", "nothing to do")
_LOSS_SCALE = Retired("losses are divided by the counts of the whole optimiser step, so no scale is needed.", harmless=(True,))
_ENGINE = Retired("engine options stand in strategy_args.strategy_config.", harmless=(False, "disabled", {}))

_ROOT: dict[str, Retired] = {
    **dict.fromkeys(("num_gpus_per_node", "num_nodes", "world_size", "local_rank", "partial_gpu_mode"), _DEVICES),
    **dict.fromkeys(("teacher", "student_train", "student_infer", "is_pure_opd", "use_opd"), _DISTILLATION),
    "pure_opd_pipeline_type": _DISTILLATION,
    **dict.fromkeys(("dirty_data_mask", "open_feedback_turn", "use_token_reward", "exp_mode"), _NEVER_READ),
    **dict.fromkeys(("is_offload_states", "is_offload_optimizer_states_in_train_step", "transfer_backend"), _OFFLOAD),
    "model_update_buffer_size_mb": _OFFLOAD,
    **dict.fromkeys(("profiler_timeline", "profiler_memory", "profiler_output_dir", "length_profiler_dir"), _PROFILER),
    "otlp_output_dir": _PROFILER,
    **dict.fromkeys(("use_reward_scaling", "add_len_reward", "use_reward_norm", "report_length_and_rewards"), _OTHER_PIPELINE),
    **dict.fromkeys(
        ("norm_mean_type", "norm_std_type", "generate_opt_level", "is_num_return_sequences_expand"), _OTHER_PIPELINE
    ),
    **dict.fromkeys(("is_use_additional_prompts", "max_additional_running_prompts"), _OTHER_PIPELINE),
    "user_defined_rollout_loop_cls": _OTHER_PIPELINE,
    **dict.fromkeys(("enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute"), _OLD_LOGPROBS),
    "router_args": _ROUTER,
    "system_envs": _SYSTEM_ENVS,
    "max_running_requests": Retired("num_env_groups × group_size episodes run at once."),
    "rpc_timeout": Retired("every wait has its deadline in deadlines."),
    "base_dir": Retired("a run writes to output_dir/exp_name/time."),
    "model_download_type": Retired("models are loaded from a folder or the hub's cache."),
    "rollout_dump_dir": Retired("finished trajectories always stand in the run folder's rollouts.jsonl."),
    "rollout_mock": Retired("the run folder's rollouts.jsonl serves `turnwise train --from-rollouts`."),
    "pipeline_cls": Retired("the command chooses the pipeline: turnwise train, sft, eval, rollout."),
    "enable_reference": Retired("a reference runs exactly where a KL needs it.", harmless=(False,)),
    "batch_adjust_mode": Retired("batches are never copied, dropped or reordered to fit a divisor."),
    "env_monitor": Retired("env_step_timeout_s and episode_timeout_s end what hangs."),
    "l2": Retired("use actor_train.training_args.weight_decay.", "refuse", harmless=(0, 0.0)),
    "parse_tool_call_parameter_to_dict": Retired("tools aren't in this version.", "refuse", harmless=(False,)),
    "skip_mock_system_prompt": Retired("the chat template is rendered as it is.", harmless=(False,)),
    **dict.fromkeys(("val_prompt_length", "val_response_length", "val_sequence_length"), Retired("one sequence_length holds.")),
    "checkpoint_config.async_upload": Retired("checkpoints are written to the file system before the next step."),
    "reward_normalization.global_scale_factor": _NEVER_READ,
    "reward_normalization.global_shift_value": _NEVER_READ,
}

_ROLE: dict[str, Retired] = {
    "worker_cls": _WORKER_CLASS,
    "system_envs": _SYSTEM_ENVS,
    "llm_proxy": _PROXY,
    "data_args": Retired("the chat template is the tokenizer's own, and tasks come from custom_envs.", "nothing to do"),
    "infer_batch_size": _MICRO_BATCH,
    **dict.fromkeys(("name", "world_size", "num_gpus_per_worker", "max_concurrency", "backend_timeout"), _WORKER),
    **dict.fromkeys(("offload_nccl", "sequence_packing_args", "logits_in_fp32", "mtp_training_mode", "router_replay"), _ENGINE),
    **dict.fromkeys(("sequence_length_round_in_train", "sequence_length_round_in_infer"), _ENGINE),
    "apply_loss_scale": _LOSS_SCALE,
    **dict.fromkeys(("opd_kl_coef", "tag_included"), _DISTILLATION),
    "model_args.adapter_name_or_path": Retired("name the adapter's folder as the model (pretrain).", "refuse"),
    **dict.fromkeys(("model_args.device_map", "model_args.ulysses_size", "model_args.moe_aux_loss_coef"), _ENGINE),
    **dict.fromkeys(("model_args.model_config_kwargs", "model_args.gradient_checkpointing_use_reentrant"), _ENGINE),
    "model_args.num_labels": Retired("a value head has one output.", harmless=(1,)),
    **dict.fromkeys(("model_args.additional_target", "model_args.autocast_adapter_dtype"), _ENGINE),
    **dict.fromkeys(("training_args.output_dir", "training_args.max_steps", "training_args.num_train_epochs"), _SCHEDULE),
    **dict.fromkeys(("training_args.seed", "training_args.data_seed", "training_args.dataloader_num_workers"), _SCHEDULE),
    **dict.fromkeys(("training_args.fp16", "training_args.bf16", "training_args.tf32"), _PRECISION),
    "training_args.save_hf_model": Retired("checkpoints hold a Hugging Face model folder.", harmless=(True,)),
    "generating_args.num_beams": _BEAMS,
    "generating_args.length_penalty": _BEAMS,
    "generating_args.max_length": Retired("sequence_length bounds a context and max_new_tokens a response."),
    "generating_args.logprobs": _LOGPROBS,
    "generating_args.include_stop_str_in_output": Retired("what was sampled stays in the context, stop strings too."),
}

_MANAGER: dict[str, Retired] = {
    "format_penalty": Retired("it belongs to custom_envs.<tag>.env_config, which the environment reads.", harmless=(0, 0.0)),
    "llm_proxy": _PROXY,
    "worker_cls": _WORKER_CLASS,
    "system_envs": _SYSTEM_ENVS,
    "max_concurrency": _WORKER,
    "name": _WORKER,
    **{key: value for key, value in _ROLE.items() if key.startswith("generating_args.")},
}

_ENV: dict[str, Retired] = {
    "max_env_step_concurrent": Retired("max_env_num_per_worker and use_thread_lock bound blocking environments."),
    "agent_runner_cls": _RUNNER,
    "agent_runner_config": _RUNNER,
    "tool_wrapper": Retired("tools aren't in this version; an environment of your own can call them in its step.", "refuse"),
    "pre_step_template": _IMAGES,
    "next_step_template": _IMAGES,
}

RETIRED: Mapping[str, Retired] = {
    **_ROOT,
    **{f"<role>.{key}": value for key, value in _ROLE.items()},
    **{f"<manager>.{key}": value for key, value in _MANAGER.items()},
    **{f"<env>.{key}": value for key, value in _ENV.items()},
}
"""By dotted key, with `<role>`, `<manager>` and `<env>` for the sections that occur more than once."""

ANYWHERE: Mapping[str, Retired] = {"use_remove_padding": _PACKING}
"""Keys that published files have in sections of every kind."""

MANAGERS: Mapping[str, tuple[str, str]] = {
    "TrajEnvManager": ("trajectory", ""),
    "StepEnvManager": ("step", ""),
    "VLTrajEnvManager": ("", "images in observations aren't in this version."),
    "StepConcatEnvManager": (
        "step",
        "step templates in one growing context aren't in this version; mode: step makes a sample a turn.",
    ),
    "AgentNativeStepEnvManager": ("", "environments that write the messages themselves aren't in this version."),
    "ProxyEnvManager": ("", "agents that call the model through a proxy aren't in this version."),
}
"""By the class name in `env_manager_cls`: our mode, or what this version lacks."""

BUILT_IN_ENV_CONFIG: Mapping[str, str] = {
    "seed": "seeds follow from the run's seed, the tag and the group.",
    "map_seed": "seeds follow from the run's seed, the tag and the group.",
    "special_token_list": "an environment never sees special tokens.",
}
"""Keys of a built-in environment's env_config that the framework decides on."""
