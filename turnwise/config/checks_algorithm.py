"""Contradictions among the settings of credit, loss, sampling, asynchrony, validation and determinism."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.config.problems import Path, Problem
from turnwise.config.resolve import streaming_obstacles
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig
from turnwise.errors import nearest
from turnwise.spec import MAX_KEPT, PG_VARIANTS

UNBOUNDED_CUT = (
    "without a top_k the sampler doesn't say which tokens top_p or min_p left, and repetition_penalty changes each token's "
    "distribution: exp(old − sampled) is no importance ratio then. Sample with top_k 1 to "
    f"{MAX_KEPT} beside top_p and min_p, or with top_p 1, top_k 0, min_p 0; repetition_penalty must be 1"
)


def algorithm_problems(config: AgenticConfig) -> Iterator[Problem]:
    """Everything that is wrong with these settings, but for `sibling_problems`."""
    checks = (_normalization, _loss, _sampling, _asynchrony, _validations, _deterministic)
    for check in checks:
        yield from check(config)


def sibling_problems(config: AgenticConfig | SFTConfig) -> Iterator[Problem]:
    """Groups of one, which can be played, but teach nothing."""
    if isinstance(config, SFTConfig) or config.train_env_manager.group_size > 1:
        return
    normalization, estimator = config.reward_normalization, config.estimator
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
    estimator = config.estimator
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


def _loss(config: AgenticConfig) -> Iterator[Problem]:
    allowed = config.variant.parameters
    if config.pg_variant in PG_VARIANTS:
        for name in config.pg_args:
            if name not in allowed:
                known = ", ".join(allowed) or "none"
                message = f"pg_variant {config.pg_variant} has no such parameter (it has: {known}).{nearest(name, allowed)}"
                yield Problem(("pg_args", name), message)
            elif message := _wrong_parameter(name, config.pg_args):
                yield Problem(("pg_args", name), message)
    if refusal := config.variant.ratio_refusal(config.pg_variant, config.ratio_type):
        yield Problem.at("ratio_type", f"{config.ratio_type}: {refusal}")
    correction = config.train_infer_correction
    for index, band in enumerate(correction.filters if correction else ()):
        if band.ratio_low >= band.ratio_high:
            path = ("train_infer_correction", "filters", index)
            yield Problem(path, f"ratio_low {band.ratio_low} isn't below ratio_high {band.ratio_high}")


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


def _sampling(config: AgenticConfig) -> Iterator[Problem]:
    sampling = config.sampling("train")
    if sampling.is_greedy:
        message = "training samples greedily (temperature 0, or do_sample false), and greedy tokens can't be trained on"
        where = "train_env_manager" if config.train_env_manager.generating_args.is_greedy else "actor_infer"
        yield Problem.at(f"{where}.generating_args", message)
    yield from _cut_sampling(config)
    for tag in config.train_env_manager.env_tags:
        if tag in config.custom_envs and (limit := config.max_new_tokens("train", tag)) >= config.sequence_length:
            message = f"{limit} tokens of one response leave no room for a prompt in a sequence_length of"
            of_tag = config.custom_envs[tag].max_tokens_per_step == limit
            keys = [f"{role}.generating_args.max_new_tokens" for role in ("train_env_manager", "actor_infer")]
            path: list[Path] = [("custom_envs", tag, "max_tokens_per_step")] if of_tag else []
            path += [tuple(key.split(".")) for key in keys if config.is_set(key)]
            if path:
                yield Problem(path[0], f"{message} {config.sequence_length}")


def _cut_sampling(config: AgenticConfig) -> Iterator[Problem]:
    """Comparisons with log-probs of the sampler that don't hold where sampling is cut."""
    sampling = config.sampling("train")
    uses_sampled = config.train_infer_correction or config.use_rollout_log_probs
    if sampling.is_truncated and not sampling.keeps_ids and uses_sampled:
        key = "train_infer_correction" if config.train_infer_correction else "use_rollout_log_probs"
        yield Problem.at(
            key,
            f"{UNBOUNDED_CUT}, or leave this out",
        )
    if sampling.keeps_ids and config.use_rollout_log_probs and config.add_token_level_kl:
        yield Problem.at(
            "use_rollout_log_probs",
            "true takes the sampler's log-probs, which are over the tokens that top_k left, and the KL of add_token_level_kl "
            "needs those over the whole vocabulary; leave one of the two out, or set top_k 0, top_p 1, min_p 0",
        )


def _asynchrony(config: AgenticConfig) -> Iterator[Problem]:
    """Settings under which stale samples can't be corrected, or results would wrongly depend on time."""
    ratio = config.async_generation_ratio
    if ratio == 0:
        return
    if config.sampling("train").is_truncated and not config.sampling("train").keeps_ids:
        yield Problem.at(
            "async_generation_ratio",
            f"{ratio} trains on samples that are up to {_staleness(config)} old, and {UNBOUNDED_CUT}, or train "
            "synchronously (async_generation_ratio: 0)",
        )
    for obstacle in streaming_obstacles(config) if config.stream_training else ():
        yield Problem.at("stream_training", f"true trains on the groups of a step as they end, but {obstacle}; leave it out")


def _staleness(config: AgenticConfig) -> str:
    """The bound of staleness, with its arithmetic."""
    ratio, every = config.async_generation_ratio, config.actor_train.model_update_frequency
    if every == 1:
        return f"{ratio} steps"
    return f"{ratio + every - 1} steps ({ratio} + model_update_frequency {every} − 1)"


def _validations(config: AgenticConfig) -> Iterator[Problem]:
    """Problems of `save_best` and `early_stopping` with the validations of the config."""
    for key, section in (("save_best", config.save_best), ("early_stopping", config.early_stopping)):
        if section is not None and not section.metric.startswith("val/"):
            message = f"{section.metric!r} is no metric of a validation; those begin with val/, such as val/score/mean"
            yield Problem.at(f"{key}.metric", message)
    every, updated = config.eval_steps, config.actor_train.model_update_frequency
    if config.save_best is not None and every % updated:
        yield Problem.at(
            "save_best",
            f"validations every eval_steps {every} play older weights than the trainer's, which are sent every "
            f"model_update_frequency {updated} steps; make eval_steps a multiple of that",
        )


def _deterministic(config: AgenticConfig) -> Iterator[Problem]:
    if not config.deterministic:
        return
    every = config.actor_train.model_update_frequency
    if config.save_steps % every:
        message = f"{config.save_steps} isn't a multiple of actor_train.model_update_frequency {every}"
        yield Problem.at("save_steps", f"{message}: a run that goes on would sample from other weights (deterministic: true)")
    for tag, env in config.custom_envs.items():
        if env.use_thread_lock:
            message = "threads answer in any order, which deterministic: true forbids; leave it out"
            yield Problem(("custom_envs", tag, "use_thread_lock"), message)
