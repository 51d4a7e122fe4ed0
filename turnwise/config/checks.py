"""Contradictions and impossible sizes, found before a model is loaded. Each message shows the arithmetic or both choices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any

from turnwise.config.asynchrony import asynchrony, cut_sampling
from turnwise.config.by_validation import sft_validation_problems, validation_problems
from turnwise.config.environments import CustomEnv, EnvManager
from turnwise.config.model_problems import adapter_problems, model_problems
from turnwise.config.problems import Path, Problem
from turnwise.config.resolve import estimator_of, variant_of
from turnwise.config.roles import ModelArgs
from turnwise.config.rows import row_problems
from turnwise.config.schema import AgenticConfig, Split
from turnwise.config.sft import SFTConfig
from turnwise.errors import nearest
from turnwise.spec import KL_LOSSES, PG_VARIANTS, ROWS_TAG, STEP_PLACEHOLDERS, STRATEGIES, TRACKERS, TURN_PLACEHOLDERS


def find_problems(config: AgenticConfig | SFTConfig) -> list[Problem]:
    """Everything that makes the config impossible, all at once, but for `sibling_problems`."""
    shared = [*model_problems(config), *_trackers(config)]
    if isinstance(config, SFTConfig):
        return [*shared, *_sft(config)]
    checks = (
        _environments,
        _sizes,
        _normalization,
        _rewards,
        _kl,
        _loss,
        _roles,
        _critic,
        _sampling,
        _cache,
        asynchrony,
        validation_problems,
        _deterministic,
    )
    return [*shared, *(problem for check in checks for problem in check(config))]


def _sft(config: SFTConfig) -> Iterator[Problem]:
    if not config.train_files:
        yield Problem.at("train_files", "[] leaves nothing to train on; name JSONL files of messages")
    if STRATEGIES[config.strategy_args.strategy_name].kind != "train":
        yield _wrong_strategy("strategy_args", config.strategy_args.strategy_name, "train")
    if config.eval_steps > 0 and not config.val_files:
        yield Problem.at("eval_steps", f"{config.eval_steps} asks for a validation loss, but there are no val_files")
    yield from sft_validation_problems(config)
    yield from _head("model_args", config.model_args)
    yield from adapter_problems("model_args", config.model_args)


def _head(path: str, model: ModelArgs) -> Iterator[Problem]:
    if model.model_type != "causal_lm":
        message = f"{model.model_type} is a value head, which writes no text; this model needs causal_lm"
        yield Problem.at(f"{path}.model_type", message)


def _trackers(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Arguments stand under the name of a tracker, or alone where one tracker of `track_with` takes any."""
    takers = [name for name in config.track_with if TRACKERS[name].arguments != {}]
    for key, value in config.tracker_kwargs.items():
        if key not in TRACKERS:
            if len(takers) == 1:
                yield from _tracker_argument(takers[0], ("tracker_kwargs", key), value)
            else:
                names = " or ".join(takers) or f"no tracker of track_with ({', '.join(config.track_with)})"
                yield Problem(
                    ("tracker_kwargs", key), f"taken by {names}; write it below the name of its tracker, or remove it"
                )
        elif key not in config.track_with:
            yield Problem(
                ("tracker_kwargs", key), f"track_with is {', '.join(config.track_with)}; add {key} there, or remove this"
            )
        elif not isinstance(value, dict):
            yield Problem(("tracker_kwargs", key), f"got {value!r}; the arguments of a tracker are a mapping")
        else:
            for name, argument in value.items():
                yield from _tracker_argument(key, ("tracker_kwargs", key, name), argument)


def _tracker_argument(tracker: str, path: Path, value: object) -> Iterator[Problem]:
    known, name = TRACKERS[tracker].arguments, str(path[-1])
    if known is None:
        return
    if name not in known:
        yield Problem(path, f"{tracker} takes {', '.join(known) or 'no arguments'}.{nearest(name, known)}")
    elif not isinstance(value, known[name]):
        yield Problem(path, f"got {value!r}; expected a {known[name].__name__}")


def _environments(config: AgenticConfig) -> Iterator[Problem]:
    if not config.custom_envs and not config.data.train_files:
        message = "there is nothing to train on; name an environment, such as custom_envs: {Lake: {env_type: frozen_lake}}, "
        message += "or rows, data.train_files"
        yield Problem.at("custom_envs", message)
    yield from row_problems(config)
    for tag, env in config.custom_envs.items():
        yield from _templates(tag, env)
    for split in ("train", "val"):
        manager, name = config.env_manager(split), f"{split}_env_manager"
        is_repeated = split == "val" and not manager.is_set("tags")
        if config.custom_envs and not manager.tags and not is_repeated:
            known = ", ".join(config.custom_envs)
            yield Problem.at(
                f"{name}.tags", f"[] leaves nothing to play; name tags of custom_envs ({known}), or leave it out for all"
            )
        files = config.data.train_files if split == "train" else config.data.val_files
        if manager.has_rows and ROWS_TAG not in config.custom_envs and not files:
            yield Problem.at(f"{name}.tags", f"{ROWS_TAG!r} is the tag of rows, and there are no data.{split}_files; name some")
        for tag in () if is_repeated else manager.env_tags:
            if tag not in config.custom_envs:
                known = ", ".join(config.custom_envs) or "none"
                message = f"{tag!r} isn't a tag of custom_envs ({known}).{nearest(tag, config.custom_envs)}"
                yield Problem.at(f"{name}.tags", message)
        yield from _partition(manager, name)


def _templates(tag: str, env: CustomEnv) -> Iterator[Problem]:
    path = ("custom_envs", tag, "agent_template")
    allowed = TURN_PLACEHOLDERS if env.mode == "trajectory" else TURN_PLACEHOLDERS + STEP_PLACEHOLDERS
    try:
        names = [name for _, name, _, _ in Formatter().parse(env.agent_template) if name is not None]
    except ValueError as error:
        yield Problem(path, f"{error}; write a brace that is part of the text twice")
        return
    for name in names:
        if name not in allowed:
            known = " ".join(f"{{{placeholder}}}" for placeholder in allowed)
            hint = f" {{{name}}} needs mode: step." if name in STEP_PLACEHOLDERS else nearest(name, allowed)
            yield Problem(path, f"{{{name}}} is no placeholder of mode {env.mode}; it has {known}.{hint}")


def _partition(manager: EnvManager, name: str) -> Iterator[Problem]:
    parts = manager.num_groups_partition
    if not manager.tags:
        return
    if len(parts) != len(manager.tags):
        yield Problem.at(f"{name}.num_groups_partition", f"{len(parts)} numbers for {len(manager.tags)} tags: {manager.tags}")
    elif sum(parts) != manager.num_env_groups:
        total = " + ".join(str(part) for part in parts)
        message = f"{total} = {sum(parts)}, but num_env_groups is {manager.num_env_groups}; make them equal"
        yield Problem.at(f"{name}.num_groups_partition", message)


def _sizes(config: AgenticConfig) -> Iterator[Problem]:
    batches: tuple[tuple[str, int, Split], ...] = (
        ("rollout_batch_size", config.rollout_batch_size, "train"),
        ("val_batch_size", config.val_batch_size, "val"),
    )
    for key, batch, split in batches:
        if split == "val" and not config.uses_validation and not config.is_set("val_batch_size"):
            continue
        size = config.env_manager(split).group_size
        if batch % size:
            groups, rest = divmod(batch, size)
            near = f"{groups * size} or {(groups + 1) * size}" if groups else str(size)
            yield Problem.at(
                key,
                f"{batch} trajectories don't split into groups of {size} ({batch} = {groups} × {size} + {rest}); "
                f"use {near}, or another {split}_env_manager.group_size",
            )
    if not config.is_set("sequence_length") and (config.prompt_length is None) != (config.response_length is None):
        given, missing = ("prompt_length", "response_length") if config.prompt_length else ("response_length", "prompt_length")
        yield Problem.at(given, f"sequence_length is prompt_length + response_length; set {missing} too, or sequence_length")


def sibling_problems(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Groups of one, which can be played, but teach nothing."""
    if isinstance(config, SFTConfig) or config.train_env_manager.group_size > 1:
        return
    normalization, estimator = config.reward_normalization, estimator_of(config)
    centres_groups = normalization.grouping == "traj_group_id" and "group" in normalization.statistics
    if estimator.compares_siblings and (estimator.normalization == "own" or centres_groups):
        message = f"1 leaves every advantage of {config.adv_estimator} at 0, since it compares siblings; use at least 2"
        if estimator.has_step_returns:
            message = f"1 leaves {config.adv_estimator} no siblings with whose turns a turn could be compared; use at least 2"
        yield Problem.at("train_env_manager.group_size", message)
    if config.group_filter == "non_zero_variance":
        message = "non_zero_variance keeps groups whose scores differ, and those of group_size 1 can't; leave it out"
        yield Problem.at("group_filter", message)


def _normalization(config: AgenticConfig) -> Iterator[Problem]:
    normalization, name = config.reward_normalization, config.adv_estimator
    estimator = estimator_of(config)
    parts = [key for key in ("grouping", "method", "norm_mean_type", "norm_std_type") if normalization.is_set(key)]
    if estimator.normalization == "own":
        if parts:
            yield Problem.at("reward_normalization", f"{name} centres scores in its own way; remove this section")
        return
    if estimator.needs_mean and normalization.statistics[0] == "none":
        yield Problem.at(
            "reward_normalization.method",
            f"{normalization.method} contradicts adv_estimator {name}, which compares scores with their group's; use mean_std "
            "or mean (with grpo: Dr. GRPO), or adv_estimator reinforce for plain scores",
        )
    is_single_reward = estimator.placement != "score" and not estimator.has_step_returns and config.reward_placement == "turn"
    if is_single_reward and normalization.statistics != ("none", "none"):
        yield Problem.at(
            "reward_normalization",
            f"with reward_placement turn, {name} works on single turn rewards, which can't be normalised; use method "
            "identity, or reward_placement final",
        )


def _rewards(config: AgenticConfig) -> Iterator[Problem]:
    estimator = estimator_of(config)
    if config.group_filter == "non_zero_variance" and "greedy_sibling" in estimator.needs:
        message = f"non_zero_variance drops groups whose siblings scored alike, and adv_estimator {config.adv_estimator} learns"
        yield Problem.at("group_filter", f"{message} from those too, by the score of a greedy sibling; leave one of them out")
    if config.whiten_rewards and "greedy_sibling" in estimator.needs:
        message = f"moves the rewards that {config.adv_estimator} compares with the score of a greedy sibling"
        yield Problem.at("whiten_rewards", f"{message}; use whiten_advantages, or leave it out")
    weights = (config.episode_reward_weight, config.step_reward_weight)
    if estimator.mixes_step_advantages and not estimator.is_own and weights == (0.0, 0.0):
        message = "0, and step_reward_weight is 0 too: every advantage would be 0; set one of them"
        yield Problem.at("episode_reward_weight", message)


def _kl(config: AgenticConfig) -> Iterator[Problem]:
    if config.add_token_level_kl and config.init_kl_coef == 0:
        message = "takes init_kl_coef × KL from the reward, and init_kl_coef is 0; set it (say 0.001), or leave this out"
        yield Problem.at("add_token_level_kl", message)
    if config.use_kl_loss and config.kl_loss_type not in KL_LOSSES:
        reason = "the expected gradient of k1 is zero" if config.kl_loss_type == "k1" else "abs estimates no KL"
        yield Problem.at("kl_loss_type", f"{config.kl_loss_type} can't be a loss: {reason}; use {' or '.join(KL_LOSSES)}")


def _loss(config: AgenticConfig) -> Iterator[Problem]:
    allowed = variant_of(config).parameters
    if config.pg_variant in PG_VARIANTS:
        for name in config.pg_args:
            if name not in allowed:
                known = ", ".join(allowed) or "none"
                message = f"pg_variant {config.pg_variant} has no such parameter (it has: {known}).{nearest(name, allowed)}"
                yield Problem(("pg_args", name), message)
            elif message := _wrong_parameter(name, config.pg_args):
                yield Problem(("pg_args", name), message)
    if refusal := variant_of(config).ratio_refusal(config.pg_variant, config.ratio_type):
        yield Problem.at("ratio_type", f"{config.ratio_type}: {refusal}")
    correction = config.train_infer_correction
    for index, band in enumerate(correction.filters if correction else ()):
        if band.ratio_low >= band.ratio_high:
            path = ("train_infer_correction", "filters", index)
            yield Problem(path, f"ratio_low {band.ratio_low} isn't below ratio_high {band.ratio_high}")
    if correction is not None and config.use_rollout_log_probs:
        message = "use_rollout_log_probs takes the sampler's log-probs as old ones, so every ratio is 1; remove one of the two"
        yield Problem.at("train_infer_correction", message)


def _wrong_parameter(name: str, given: Mapping[str, Any]) -> str:
    """The reason why a built-in loss can't have the parameter's value among the `given` ones; empty if it can."""
    value = given[name]
    if name == "dual_clip" and value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        return f"got {value!r}; expected a number that isn't negative"
    if name.startswith("tau_") and value == 0:
        return "0 is no temperature; it divides the loss"
    if name == "dual_clip" and value <= 1:
        return f"{value} would bound losses that no ratio has moved yet; use more than 1 (3 is usual), or dual_clip_loss: false"
    if name == "fraction" and value > 1:
        return f"{value} is no share of the tokens; use at most 1"
    if name == "cap" and value == 0:
        return "0 takes the weight, and with it the loss, from every token"
    if name == "covariance_low" and not _wrong_parameter("covariance_high", given) and value >= given["covariance_high"]:
        return f"{value} isn't below covariance_high {given['covariance_high']}, so that no token could be chosen"
    return ""


_ROLE_KINDS = {
    "actor_train": ("train",),
    "actor_infer": ("sampling",),
    "critic": ("train",),
    "reference": ("forward",),
    "reward": ("forward", "sampling"),
}


def _roles(config: AgenticConfig) -> Iterator[Problem]:
    for name, role in config.roles.items():
        strategy = role.strategy_args.strategy_name
        if STRATEGIES[strategy].kind not in _ROLE_KINDS[name]:
            yield _wrong_strategy(f"{name}.strategy_args", strategy, *_ROLE_KINDS[name])
        if name == "actor_infer" and config.on_weight_update == "keep" and not STRATEGIES[strategy].freezes:
            message = f"{strategy} can't let responses stand still; take abort_continue, or sample with vllm or sglang"
            yield Problem.at("on_weight_update", message)
        known, elsewhere = STRATEGIES[strategy].options, STRATEGIES[strategy].set_elsewhere
        for option in role.strategy_args.strategy_config:
            if option in elsewhere:
                message = f"{strategy} gets it from the run's other settings (model, dtype, length, temperature); leave it out"
                yield Problem.at(f"{name}.strategy_args.strategy_config.{option}", message)
            if known is not None and option not in known and name in config.active_roles:
                message = f"{strategy} has no such option (it has: {', '.join(known) or 'none'}).{nearest(option, known)}"
                yield Problem.at(f"{name}.strategy_args.strategy_config.{option}", message)
        if role.device_mapping is not None and len(role.device_mapping) % role.model_parallel_size:
            yield Problem.at(
                f"{name}.device_mapping",
                f"{len(role.device_mapping)} devices don't hold whole copies of the model on tensor × pipeline parallel "
                f"{role.model_parallel_size} devices each",
            )

    trained, sampled = (role.model_args.model_name_or_path for role in (config.actor_train, config.actor_infer))
    if sampled != trained:
        yield Problem.at(
            "actor_infer.model_args.model_name_or_path",
            f"{sampled} isn't the model that is trained, actor_train.model_args.model_name_or_path {trained}; actor_infer "
            "samples from the trained weights, so remove it here",
        )
    yield from _head("actor_train.model_args", config.actor_train.model_args)
    yield from adapter_problems("actor_train.model_args", config.actor_train.model_args)
    yield from _head("actor_infer.model_args", config.actor_infer.model_args)


def _critic(config: AgenticConfig) -> Iterator[Problem]:
    if not config.needs_critic:
        return
    if config.critic.model_args.model_type != "token_classification":
        message = f"{config.critic.model_args.model_type} writes text; a critic has a value head, token_classification"
        yield Problem.at("critic.model_args.model_type", message)
    yield from adapter_problems("critic.model_args", config.critic.model_args)
    if config.critic_warmup >= max(config.max_steps, 1):
        message = f"the first {config.critic_warmup} steps train only the critic, and max_steps is {config.max_steps}"
        yield Problem.at("critic_warmup", f"{message}: the actor would never be trained; use at most {config.max_steps - 1}")


def _wrong_strategy(path: str, strategy: str, *kinds: str) -> Problem:
    allowed = ", ".join(name for name, spec in STRATEGIES.items() if spec.kind in kinds)
    return Problem.at(f"{path}.strategy_name", f"{strategy} can't do this role's work; use one of {allowed}")


def _sampling(config: AgenticConfig) -> Iterator[Problem]:
    sampling = config.sampling("train")
    if sampling.is_greedy:
        message = "training samples greedily (temperature 0, or do_sample false), and greedy tokens can't be trained on"
        where = "train_env_manager" if config.train_env_manager.generating_args.is_greedy else "actor_infer"
        yield Problem.at(f"{where}.generating_args", message)
    yield from cut_sampling(config)
    for tag in config.train_env_manager.env_tags:
        if tag in config.custom_envs and (limit := config.max_new_tokens("train", tag)) >= config.sequence_length:
            message = f"{limit} tokens of one response leave no room for a prompt in a sequence_length of"
            of_tag = config.custom_envs[tag].max_tokens_per_step == limit
            keys = [f"{role}.generating_args.max_new_tokens" for role in ("train_env_manager", "actor_infer")]
            path: list[Path] = [("custom_envs", tag, "max_tokens_per_step")] if of_tag else []
            path += [tuple(key.split(".")) for key in keys if config.is_set(key)]
            if path:
                yield Problem(path[0], f"{message} {config.sequence_length}")


def _cache(config: AgenticConfig) -> Iterator[Problem]:
    strategy, shape = config.actor_infer.strategy_args, config.model_shape()
    if strategy.strategy_name != "embedded" or shape is None:
        return
    token, length = shape.kv_bytes_per_token(config.actor_infer.model_args.dtype), config.sequence_length
    if config.kv_cache_bytes < token * length:
        yield Problem.at(
            "actor_infer.strategy_args.strategy_config.kv_cache_bytes",
            f"{config.kv_cache_bytes:,} can't hold one sequence: {token:,} bytes a token × sequence_length {length:,} = "
            f"{token * length:,}; raise it, or lower sequence_length",
        )


_BLOCKING = "threads answer in any order, which deterministic: true forbids; leave it out"


def _deterministic(config: AgenticConfig) -> Iterator[Problem]:
    if not config.deterministic:
        return
    every = config.actor_train.model_update_frequency
    if config.save_steps % every:
        message = f"{config.save_steps} isn't a multiple of actor_train.model_update_frequency {every}"
        yield Problem.at("save_steps", f"{message}: a run that goes on would sample from other weights (deterministic: true)")
    if config.train_env_manager.group_size_redundancy:
        message = "lets the quickest episodes win, which deterministic: true forbids; set it to 0"
        yield Problem.at("train_env_manager.group_size_redundancy", message)
    for split in ("train", "val"):
        if config.env_manager(split).max_env_num_per_worker:
            yield Problem.at(f"{split}_env_manager.max_env_num_per_worker", _BLOCKING)
    for tag, env in config.custom_envs.items():
        if env.use_thread_lock:
            yield Problem(("custom_envs", tag, "use_thread_lock"), _BLOCKING)
    sampler = config.actor_infer.strategy_args.strategy_name
    if sampler not in ("embedded", "hf"):
        message = f"{sampler} schedules by time, which deterministic: true forbids; use embedded"
        yield Problem.at("actor_infer.strategy_args.strategy_name", message)
