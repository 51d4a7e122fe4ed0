"""Known keys that were set but change nothing in this combination: warnings, and errors under `--strict`.

A key that is set to what it would be anyway asks for nothing, and is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import yaml

from turnwise.config.problems import Problem, as_sentences
from turnwise.config.resolve import estimator_of, published_clips, variant_of
from turnwise.config.roles import Role
from turnwise.config.schema import AgenticConfig, Split
from turnwise.config.section import Section
from turnwise.config.sft import SFTConfig

S = TypeVar("S", bound=Section)
S_contra = TypeVar("S_contra", bound=Section, contravariant=True)


@dataclass(frozen=True, slots=True)
class Requirement(Generic[S_contra]):
    """Keys of a section that work where `works` says so; elsewhere setting one is answered with `reason`."""

    keys: tuple[str, ...]
    works: Callable[[S_contra], bool]
    reason: str


def _never(section: Section) -> bool:
    return False


def _takes_turn_rewards(config: AgenticConfig) -> bool:
    estimator = estimator_of(config)
    return estimator.placement != "score" or estimator.is_own


def _uses_step_returns(config: AgenticConfig) -> bool:
    return config.step_reward_weight != 0 or not estimator_of(config).mixes_step_advantages


def _normalizes_groups(config: AgenticConfig) -> bool:
    return "group" in config.reward_normalization.statistics or estimator_of(config).is_own


def _clips(config: AgenticConfig) -> bool:
    return "clip_low" in variant_of(config).parameters


def _clips_twice(config: AgenticConfig) -> bool:
    return "dual_clip" in variant_of(config).parameters


def _takes_pg_clip(config: AgenticConfig) -> bool:
    return not (config.use_pg_clip_range and config.pg_clip_low and config.pg_clip_high)


def _weighs(config: AgenticConfig) -> bool:
    correction = config.train_infer_correction
    return correction is None or correction.is_weight is None or correction.is_weight.enabled


def _may_have_critic(config: AgenticConfig) -> bool:
    """A user's own estimator says what it needs when it is built."""
    return config.needs_critic or estimator_of(config).is_own


def _has_choice(config: AgenticConfig) -> bool:
    return _has_tasks(config) or len(config.train_env_manager.tags) > 1


def _has_tasks(config: AgenticConfig) -> bool:
    return bool(config.data.train_files)


def _names_file(*keys: str) -> Callable[[AgenticConfig], bool]:
    """Whether `agent` names one of these files, where there are rows."""
    return lambda config: not _has_tasks(config) or any(config.agent.is_set(key) for key in keys)


def _is_asynchronous(config: AgenticConfig) -> bool:
    return config.plays_ahead


def _penalizes_kl(config: AgenticConfig) -> bool:
    return config.add_token_level_kl


def _packs_by_choice(role: Role | SFTConfig) -> bool:
    return not role.strategy_args.strategy_name.startswith("torch_")


def _samples_apart(config: AgenticConfig) -> bool:
    """Whether servers may have a device of their own."""
    return config.trains_apart or len(config.actor_infer.device_mapping or ()) > 1


def _has_devices(config: AgenticConfig | SFTConfig) -> bool:
    has_replicas = isinstance(config, AgenticConfig) and config.num_replicas > 1
    return has_replicas or any(config.device_mappings.values())


def _has_unlocked(config: AgenticConfig, split: Split) -> bool:
    return any(not env.use_thread_lock for tag, env in config.custom_envs.items() if tag in config.env_manager(split).tags)


_LOCKED = "its environments have use_thread_lock, which allows one call at a time"
_ROWS = ("val_files", "prompt_key", "agent_name_key", "default_agent", "max_prompt_length", "shuffle")
_TOOL_FILES = ("tool_config_path", "function_tool_path")
_OF_TOOLS = ("tool_parser", "max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side")
_OF_TURNS = ("max_assistant_turns", "tool_timeout_s")
_AGENT = (*_TOOL_FILES, "interaction_config_path", "agent_config_path", *_OF_TOOLS, *_OF_TURNS, "max_user_turns")
_TRACE = ("trace.token2text", "trace.max_samples_per_step")

REQUIREMENTS: tuple[Requirement[AgenticConfig], ...] = (
    Requirement(("pg_clip_low", "pg_clip_high"), lambda c: c.use_pg_clip_range, "needs use_pg_clip_range: true"),
    Requirement(("pg_clip",), _takes_pg_clip, "use_pg_clip_range takes pg_clip_low and pg_clip_high instead"),
    Requirement(("pg_clip", "use_pg_clip_range"), _clips, "this pg_variant has no such clip; its parameters are in pg_args"),
    Requirement(("dual_clip_loss",), _clips_twice, "this pg_variant has no dual clip; its parameters are in pg_args"),
    Requirement(
        tuple(f"train_infer_correction.is_weight.{key}" for key in ("weight_type", "upper_bound")),
        _weighs,
        "train_infer_correction.is_weight.enabled is false",
    ),
    Requirement(
        ("lambd", "gae_granularity", "bootstrap_on_truncation"),
        lambda c: estimator_of(c).has_td_errors,
        "this adv_estimator takes no temporal differences; gae does",
    ),
    Requirement(("value_clip", "critic_warmup", "critic"), _may_have_critic, "this adv_estimator has no critic"),
    Requirement(
        ("reward_pretrain",),
        lambda c: _may_have_critic(c) or c.needs_reward_role,
        "it is the model of the critic and of the reward role, and there is neither",
    ),
    Requirement(
        ("gamma",),
        lambda c: estimator_of(c).discounts,
        "this adv_estimator discounts nothing by gamma",
    ),
    Requirement(("step_reward_gamma",), lambda c: estimator_of(c).has_step_returns, "this adv_estimator has no step returns"),
    Requirement(("step_reward_gamma",), _uses_step_returns, "step_reward_weight is 0"),
    Requirement(
        ("whiten_advantages",),
        lambda c: not estimator_of(c).whitens_advantages,
        "this adv_estimator always whitens advantages",
    ),
    Requirement(
        ("episode_reward_weight", "step_reward_weight"),
        lambda c: estimator_of(c).mixes_step_advantages,
        "this adv_estimator adds no step advantages to the episode's; gigpo does",
    ),
    Requirement(("reward_normalization.grouping",), _normalizes_groups, "neither mean nor deviation is taken over groups"),
    Requirement(("reward_placement", "whiten_rewards"), _takes_turn_rewards, "this adv_estimator works on whole scores"),
    Requirement(("init_kl_coef", "kl_penalty"), _penalizes_kl, "the KL is in the reward with add_token_level_kl"),
    Requirement(("target_kl",), _penalizes_kl, "it adapts init_kl_coef, which add_token_level_kl uses"),
    Requirement(("kl_horizon",), lambda c: c.target_kl is not None, "needs target_kl"),
    Requirement(("kl_loss_coef", "kl_loss_type"), lambda c: c.use_kl_loss, "needs use_kl_loss: true"),
    Requirement(("reference",), lambda c: c.needs_reference, "no KL to it is taken; set use_kl_loss or add_token_level_kl"),
    Requirement(("max_refill_factor",), lambda c: c.group_filter is not None, "needs group_filter"),
    Requirement(("prompt_length", "response_length"), lambda c: not c.departs("sequence_length"), "sequence_length is set"),
    Requirement(
        ("stale_groups", "stream_training", "on_weight_update", "cpu_split"), _is_asynchronous, "training is synchronous"
    ),
    Requirement(tuple(f"data.{key}" for key in _ROWS), _has_tasks, "there are no data.train_files"),
    Requirement(tuple(f"agent.{key}" for key in _AGENT), _has_tasks, "there are no data.train_files, whose rows agents play"),
    Requirement(tuple(f"agent.{key}" for key in _OF_TOOLS), _names_file(*_TOOL_FILES), "no file names tools"),
    Requirement(
        tuple(f"agent.{key}" for key in _OF_TURNS),
        _names_file(*_TOOL_FILES, "interaction_config_path"),
        "no file names tools or simulated users",
    ),
    Requirement(("agent.max_user_turns",), _names_file("interaction_config_path"), "no file names simulated users"),
    Requirement(("data.shuffle",), lambda c: not c.data.curriculum, "data.curriculum draws the rows"),
    Requirement(("data.curriculum",), _has_choice, "a single environment has no other task to prefer"),
    Requirement(("data.reward_timeout_s",), lambda c: bool(c.data.reward), "there is no data.reward"),
    Requirement(("reward",), lambda c: c.needs_reward_role, "data.reward names no reward_model, and no judge without base_url"),
    Requirement(_TRACE, lambda c: c.trace.backend is not None, "needs trace.backend"),
    Requirement(("train_env_manager.max_env_num_per_worker",), lambda c: _has_unlocked(c, "train"), _LOCKED),
    Requirement(("val_env_manager.max_env_num_per_worker",), lambda c: _has_unlocked(c, "val"), _LOCKED),
    Requirement(("actor_infer.device_mapping",), _samples_apart, "the servers are on actor_train's first device"),
    Requirement(("reference.device_mapping",), lambda c: not c.is_reference_in_policy, "the reference is in the policy"),
    Requirement(
        ("reward.device_mapping",), lambda c: len(c.reward.device_mapping or ()) > 1, "it is on actor_train's first device"
    ),
    Requirement(("num_gpus_per_node",), _has_devices, "no device_mapping names a slot"),
)


_LORA: Requirement[Role | SFTConfig] = Requirement(
    ("model_args.lora_alpha", "model_args.lora_dropout", "model_args.lora_target"),
    lambda role: role.model_args.lora_rank is not None,
    "needs lora_rank",
)
_WARMUP: Requirement[Role | SFTConfig] = Requirement(
    ("training_args.warmup_ratio",), lambda role: role.training_args.warmup_steps == 0, "warmup_steps is set"
)
_PACKING: Requirement[Role | SFTConfig] = Requirement(
    ("use_sequence_packing",), _packs_by_choice, "torch_train and torch_infer always pack"
)
_TRAIN_BATCHES: Requirement[Role | SFTConfig] = Requirement(
    ("max_tokens_per_microbatch_in_train",),
    lambda role: role.use_dynamic_batching_in_train,
    "needs use_dynamic_batching_in_train: true",
)
_INFER_BATCHES: Requirement[Role] = Requirement(
    ("max_tokens_per_microbatch_in_infer",),
    lambda role: role.use_dynamic_batching_in_infer,
    "needs use_dynamic_batching_in_infer: true",
)
_TRAINED: tuple[Requirement[Role], ...] = (_LORA, _WARMUP, _PACKING, _TRAIN_BATCHES, _INFER_BATCHES)
_COMPUTES: tuple[Requirement[Role], ...] = (
    _PACKING,
    _INFER_BATCHES,
    Requirement(
        ("training_args.per_device_train_batch_size",),
        lambda role: not role.use_dynamic_batching_in_infer,
        "use_dynamic_batching_in_infer fills micro-batches by tokens",
    ),
)
_AT_TIMES = {"actor_train": _TRAINED, "critic": _TRAINED, "reference": _COMPUTES, "reward": _COMPUTES}
"""Keys of roles that some settings leave without effect."""
UNREAD: dict[str, dict[str, list[str]]] = yaml.safe_load(Path(__file__).with_name("unread.yaml").read_text(encoding="utf-8"))
"""Role → reason → keys that the role never reads."""
ROLE_REQUIREMENTS: dict[str, tuple[Requirement[Role], ...]] = {
    role: (*_AT_TIMES.get(role, ()), *(Requirement(tuple(keys), _never, reason) for reason, keys in unread.items()))
    for role, unread in UNREAD.items()
}

SFT_REQUIREMENTS: tuple[Requirement[SFTConfig], ...] = (
    _LORA,
    _WARMUP,
    Requirement(
        ("max_tokens_per_microbatch_in_train",),
        lambda c: c.use_dynamic_batching_in_train or bool(c.val_files),
        "needs use_dynamic_batching_in_train: true",
    ),
)


def never_works(key: str) -> bool:
    """Whether a dotted key is one of a role that never reads it."""
    role, _, inner = key.partition(".")
    return any(f"{inner}.".startswith(f"{name}.") for names in UNREAD.get(role, {}).values() for name in names)


def find_ineffective(config: AgenticConfig | SFTConfig) -> list[Problem]:
    """The keys that were set without effect, each with the reason; a section that has none is named as a whole."""
    if isinstance(config, SFTConfig):
        return list(_find(SFT_REQUIREMENTS, config))
    found = [
        *_find(REQUIREMENTS, config),
        *_clip_keys(config),
        *_corrections(config),
        *_histories(config),
        *_mean_credit(config),
        *_long_warmups(config),
    ]
    for name, requirements in ROLE_REQUIREMENTS.items():
        found += _find(requirements, config.roles[name], name)
    paths = {problem.path for problem in found}
    return [problem for problem in found if not any(problem.path[:length] in paths for length in range(1, len(problem.path)))]


def ineffective(config: AgenticConfig | SFTConfig) -> list[str]:
    """A sentence for each known key that was set but changes nothing in this combination."""
    return as_sentences(find_ineffective(config))


def _find(requirements: Iterable[Requirement[S]], section: S, *prefix: str) -> Iterator[Problem]:
    for requirement in requirements:
        if requirement.works(section):
            continue
        for key in requirement.keys:
            if section.departs(key):
                yield Problem((*prefix, *key.split(".")), f"has no effect: {requirement.reason}.")


def _clip_keys(config: AgenticConfig) -> Iterator[Problem]:
    for name, asked in published_clips(config).items():
        if (given := config.pg_args[name]) != asked:
            message = f"{given} takes the place of {asked}: the published clip key has no effect; keep one of them."
            yield Problem(("pg_args", name), message)


def _corrections(config: AgenticConfig) -> Iterator[Problem]:
    correction = config.train_infer_correction
    if correction is None:
        return
    if correction.is_weight is None and not correction.filters:
        yield Problem.at("train_infer_correction", "has no effect: it names neither is_weight nor filters.")
    for index, band in enumerate(correction.filters):
        for key in ("agg_type", "ratio_low", "ratio_high"):
            if not band.enabled and band.departs(key):
                yield Problem(("train_infer_correction", "filters", index, key), "has no effect: enabled is false.")


def _mean_credit(config: AgenticConfig) -> Iterator[Problem]:
    """Credit that differs from turn to turn, under a loss that takes its mean over a sequence of several turns."""
    estimator, granularities = estimator_of(config), variant_of(config).granularities
    by_sequence = granularities[:1] == ("geometric",) and config.ratio_type != "segment"
    if not by_sequence or estimator.is_own or estimator.placement != "turn" or config.reward_placement == "final":
        return
    tags = [tag for tag in config.train_env_manager.tags if tag in config.custom_envs]
    long = [tag for tag in tags if config.custom_envs[tag].mode == "trajectory" and config.custom_envs[tag].max_steps > 1]
    if long:
        message = (
            f"{config.pg_variant} gives all tokens of a sequence the mean of their advantages, and in mode trajectory the "
            f"turns of an episode ({', '.join(long)}) are one sequence, so the credit that {config.adv_estimator} gives single "
            "turns is averaged away; set ratio_type: segment, or mode: step in the environment, or pg_variant: ppo."
        )
        yield Problem.at("pg_variant", message)


def _long_warmups(config: AgenticConfig) -> Iterator[Problem]:
    """Warm-ups that last longer than the run, so that the learning rate stays near 0."""
    for name in ("actor_train", "critic") if config.needs_critic else ("actor_train",):
        training = config.roles[name].training_args
        steps = config.num_training_steps(name) * config.optimizer_steps_per_batch(name)
        if training.warmup_steps > steps > 0:
            end = training.learning_rate * steps / training.warmup_steps
            message = f"{training.warmup_steps} is more than the {steps} optimiser steps of the run, so the learning rate"
            path = (name, "training_args", "warmup_steps")
            yield Problem(path, f"{message} ends at {end:.1g} and never reaches {training.learning_rate:g}.")


def _histories(config: AgenticConfig) -> Iterator[Problem]:
    for tag, env in config.custom_envs.items():
        if not env.is_set("history_length"):
            continue
        path = ("custom_envs", tag, "history_length")
        if env.mode == "trajectory":
            yield Problem(path, "has no effect: in mode trajectory the whole history is in the context.")
        elif "{history" not in env.agent_template:
            yield Problem(path, "has no effect: agent_template shows no {history}.")
