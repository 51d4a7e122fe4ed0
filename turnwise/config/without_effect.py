"""Known keys that were set but change nothing in this combination: warnings, and errors under `--strict`.

A key that is set to what it would be anyway asks for nothing, and is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from turnwise.config.problems import Problem, as_sentences
from turnwise.config.resolve import estimator_of, published_clips, variant_of
from turnwise.config.schema import AgenticConfig, Split
from turnwise.config.section import Section
from turnwise.config.sft import SFTConfig


class Requirement(NamedTuple):
    """Keys of a section that work where `works` says so; elsewhere setting one is answered with `reason`."""

    keys: tuple[str, ...]
    works: Callable[[Any], bool]
    reason: str


def _table(*rows: tuple[str, Callable[[Any], bool], str]) -> tuple[Requirement, ...]:
    """Requirements of rows `(keys, works, reason)`. Keys behind `section:` are keys of that section."""
    split = [(*keys.rpartition(":")[::2], works, reason) for keys, works, reason in rows]
    return tuple(
        Requirement(tuple(f"{section}.{key}" if section else key for key in keys.split()), works, reason)
        for section, keys, works, reason in split
    )


def _takes_turn_rewards(config: AgenticConfig) -> bool:
    estimator = estimator_of(config)
    return estimator.placement != "score" or estimator.is_own


def _uses_step_returns(config: AgenticConfig) -> bool:
    return config.step_reward_weight != 0 or not estimator_of(config).mixes_step_advantages


def _normalizes_groups(config: AgenticConfig) -> bool:
    return "group" in config.reward_normalization.statistics or estimator_of(config).is_own


def _takes_pg_clip(config: AgenticConfig) -> bool:
    return not (config.use_pg_clip_range and config.pg_clip_low and config.pg_clip_high)


def _weighs(config: AgenticConfig) -> bool:
    correction = config.train_infer_correction
    return correction is None or correction.is_weight is None or correction.is_weight.enabled


def _may_have_critic(config: AgenticConfig) -> bool:
    """A user's own estimator says what it needs when it is built."""
    return config.needs_critic or estimator_of(config).is_own


def _has_tasks(config: AgenticConfig) -> bool:
    return bool(config.data.train_files)


def _names_file(keys: str) -> Callable[[AgenticConfig], bool]:
    """Whether `agent` names one of these files, where there are rows."""
    return lambda config: not _has_tasks(config) or any(config.agent.is_set(key) for key in keys.split())


def _has_devices(config: AgenticConfig) -> bool:
    return config.num_replicas > 1 or any(config.device_mappings.values())


def _has_unlocked(split: Split) -> Callable[[AgenticConfig], bool]:
    def works(config: AgenticConfig) -> bool:
        tags = config.env_manager(split).tags
        return any(not env.use_thread_lock for tag, env in config.custom_envs.items() if tag in tags)

    return works


_LOCKED = "its environments have use_thread_lock, which allows one call at a time"
_TOOL_FILES = "tool_config_path function_tool_path"
_OF_TOOLS = "tool_parser max_parallel_calls max_tool_response_length tool_response_truncate_side"
_OF_TURNS = "max_assistant_turns tool_timeout_s"
_AGENT = f"{_TOOL_FILES} interaction_config_path agent_config_path {_OF_TOOLS} {_OF_TURNS} max_user_turns"

REQUIREMENTS = _table(
    ("pg_clip_low pg_clip_high", lambda c: c.use_pg_clip_range, "needs use_pg_clip_range: true"),
    ("pg_clip", _takes_pg_clip, "use_pg_clip_range takes pg_clip_low and pg_clip_high instead"),
    (
        "pg_clip use_pg_clip_range",
        lambda c: "clip_low" in variant_of(c).parameters,
        "this pg_variant has no such clip; its parameters are in pg_args",
    ),
    (
        "dual_clip_loss",
        lambda c: "dual_clip" in variant_of(c).parameters,
        "this pg_variant has no dual clip; its parameters are in pg_args",
    ),
    ("train_infer_correction.is_weight: weight_type upper_bound", _weighs, "train_infer_correction.is_weight.enabled is false"),
    (
        "lambd gae_granularity bootstrap_on_truncation",
        lambda c: estimator_of(c).has_td_errors,
        "this adv_estimator takes no temporal differences; gae does",
    ),
    ("value_clip critic_warmup critic", _may_have_critic, "this adv_estimator has no critic"),
    (
        "reward_pretrain",
        lambda c: _may_have_critic(c) or c.needs_reward_role,
        "it is the model of the critic and of the reward role, and there is neither",
    ),
    ("gamma", lambda c: estimator_of(c).discounts, "this adv_estimator discounts nothing by gamma"),
    ("step_reward_gamma", lambda c: estimator_of(c).has_step_returns, "this adv_estimator has no step returns"),
    ("step_reward_gamma", _uses_step_returns, "step_reward_weight is 0"),
    ("whiten_advantages", lambda c: not estimator_of(c).whitens_advantages, "this adv_estimator always whitens advantages"),
    (
        "episode_reward_weight step_reward_weight",
        lambda c: estimator_of(c).mixes_step_advantages,
        "this adv_estimator adds no step advantages to the episode's; gigpo does",
    ),
    ("reward_normalization.grouping", _normalizes_groups, "neither mean nor deviation is taken over groups"),
    ("reward_placement whiten_rewards", _takes_turn_rewards, "this adv_estimator works on whole scores"),
    ("init_kl_coef kl_penalty", lambda c: c.add_token_level_kl, "the KL is in the reward with add_token_level_kl"),
    ("target_kl", lambda c: c.add_token_level_kl, "it adapts init_kl_coef, which add_token_level_kl uses"),
    ("kl_horizon", lambda c: c.target_kl is not None, "needs target_kl"),
    ("kl_loss_coef kl_loss_type", lambda c: c.use_kl_loss, "needs use_kl_loss: true"),
    ("reference", lambda c: c.needs_reference, "no KL to it is taken; set use_kl_loss or add_token_level_kl"),
    ("max_refill_factor", lambda c: c.group_filter is not None, "needs group_filter"),
    ("prompt_length response_length", lambda c: not c.departs("sequence_length"), "sequence_length is set"),
    (
        "stale_groups stream_training on_weight_update cpu_split",
        lambda c: c.plays_ahead,
        "training is synchronous",
    ),
    (
        "data: val_files prompt_key agent_name_key default_agent max_prompt_length shuffle",
        _has_tasks,
        "there are no data.train_files",
    ),
    (f"agent: {_AGENT}", _has_tasks, "there are no data.train_files, whose rows agents play"),
    (f"agent: {_OF_TOOLS}", _names_file(_TOOL_FILES), "no file names tools"),
    (f"agent: {_OF_TURNS}", _names_file(f"{_TOOL_FILES} interaction_config_path"), "no file names tools or simulated users"),
    ("agent.max_user_turns", _names_file("interaction_config_path"), "no file names simulated users"),
    ("data.shuffle", lambda c: not c.data.curriculum, "data.curriculum draws the rows"),
    (
        "data.curriculum",
        lambda c: _has_tasks(c) or len(c.train_env_manager.tags) > 1,
        "a single environment has no other task to prefer",
    ),
    ("data.reward_timeout_s", lambda c: bool(c.data.reward), "there is no data.reward"),
    ("reward", lambda c: c.needs_reward_role, "data.reward names no reward_model, and no judge without base_url"),
    ("trace: token2text max_samples_per_step", lambda c: c.trace.backend is not None, "needs trace.backend"),
    ("train_env_manager.max_env_num_per_worker", _has_unlocked("train"), _LOCKED),
    ("val_env_manager.max_env_num_per_worker", _has_unlocked("val"), _LOCKED),
    (
        "actor_infer.device_mapping",
        lambda c: c.trains_apart or len(c.actor_infer.device_mapping or ()) > 1,
        "the servers are on actor_train's first device",
    ),
    ("reference.device_mapping", lambda c: not c.is_reference_in_policy, "the reference is in the policy"),
    ("reward.device_mapping", lambda c: len(c.reward.device_mapping or ()) > 1, "it is on actor_train's first device"),
    ("num_gpus_per_node", _has_devices, "no device_mapping names a slot"),
)

_TRAINED = _table(
    ("model_args: lora_alpha lora_dropout lora_target", lambda role: role.model_args.lora_rank is not None, "needs lora_rank"),
    ("training_args.warmup_ratio", lambda role: role.training_args.warmup_steps == 0, "warmup_steps is set"),
)
"""Keys of what is trained, by reinforcement or by imitation."""
_COMPUTES = _table(
    (
        "use_sequence_packing",
        lambda role: not role.strategy_args.strategy_name.startswith(("torch_", "deepspeed_")),
        "torch_train, deepspeed_train and torch_infer always pack",
    ),
    (
        "max_tokens_per_microbatch_in_infer",
        lambda role: role.use_dynamic_batching_in_infer,
        "needs use_dynamic_batching_in_infer: true",
    ),
)
_FILLED = "needs use_dynamic_batching_in_train: true"
_TRAINS = (
    *_TRAINED,
    *_COMPUTES,
    *_table(("max_tokens_per_microbatch_in_train", lambda role: role.use_dynamic_batching_in_train, _FILLED)),
)
_FROZEN = _COMPUTES + _table(
    (
        "training_args.per_device_train_batch_size",
        lambda role: not role.use_dynamic_batching_in_infer,
        "use_dynamic_batching_in_infer fills micro-batches by tokens",
    )
)
_AT_TIMES = {"actor_train": _TRAINS, "critic": _TRAINS, "reference": _FROZEN, "reward": _FROZEN}
"""Keys of roles that some settings leave without effect."""
UNREAD: dict[str, dict[str, list[str]]] = yaml.safe_load(Path(__file__).with_name("unread.yaml").read_text(encoding="utf-8"))
"""Role → reason → keys that the role never reads."""
ROLE_REQUIREMENTS: dict[str, tuple[Requirement, ...]] = {
    role: (*_AT_TIMES.get(role, ()), *(Requirement(tuple(keys), lambda _: False, reason) for reason, keys in unread.items()))
    for role, unread in UNREAD.items()
}
SFT_REQUIREMENTS = _TRAINED + _table(
    (
        "max_tokens_per_microbatch_in_train",
        lambda c: c.use_dynamic_batching_in_train or bool(c.val_files),
        _FILLED,
    )
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


def _find(requirements: Iterable[Requirement], section: Section, *prefix: str) -> Iterator[Problem]:
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
