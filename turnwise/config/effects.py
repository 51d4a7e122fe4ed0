"""Known keys that were set but change nothing in this combination: warnings, and errors under `--strict`.

A key that is set to its default asks for nothing, and is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from turnwise.config.problems import Problem, as_sentences
from turnwise.config.resolve import estimator_of, variant_of
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig


@dataclass(frozen=True, slots=True)
class Effect:
    """A key works where `works` says so; elsewhere setting it is answered with `reason`."""

    keys: tuple[str, ...]
    works: Callable[[AgenticConfig], bool]
    reason: str


def _samples_turn_rewards(config: AgenticConfig) -> bool:
    return estimator_of(config).placement != "score" or ":" in config.adv_estimator


def _steps_matter(config: AgenticConfig) -> bool:
    return config.adv_estimator in ("gigpo", "step_reinforce") or ":" in config.adv_estimator


def _discounts(config: AgenticConfig) -> bool:
    return config.adv_estimator in ("gae", "reinforce", "agentic_reinforce", "reinforce_plus_plus", "remax")


_GAE = ("lambd", "gae_granularity", "bootstrap_on_truncation")
EFFECTS: tuple[Effect, ...] = (
    Effect(("pg_clip_low", "pg_clip_high"), lambda c: c.use_pg_clip_range, "needs use_pg_clip_range: true"),
    Effect(
        ("pg_clip",),
        lambda c: not (c.use_pg_clip_range and c.pg_clip_low and c.pg_clip_high),
        "use_pg_clip_range takes pg_clip_low and pg_clip_high instead",
    ),
    Effect(
        ("pg_clip", "use_pg_clip_range"),
        lambda c: "clip_low" in variant_of(c).parameters or ":" in c.pg_variant,
        "this pg_variant doesn't clip",
    ),
    Effect(
        ("dual_clip_loss",),
        lambda c: "dual_clip" in variant_of(c).parameters or not c.dual_clip_loss or ":" in c.pg_variant,
        "this pg_variant has no dual clip",
    ),
    Effect(_GAE, lambda c: c.adv_estimator == "gae", "only adv_estimator gae uses it"),
    Effect(("value_clip", "critic_warmup", "critic"), lambda c: c.needs_critic, "this adv_estimator has no critic"),
    Effect(("gamma",), _discounts, "this adv_estimator works on whole scores; nothing is discounted by gamma"),
    Effect(("step_reward_gamma",), _steps_matter, "this adv_estimator has no step returns"),
    Effect(("episode_reward_weight", "step_reward_weight"), lambda c: c.adv_estimator == "gigpo", "only gigpo uses it"),
    Effect(("reward_placement", "whiten_rewards"), _samples_turn_rewards, "this adv_estimator works on whole scores"),
    Effect(("init_kl_coef", "kl_penalty"), lambda c: c.add_token_level_kl, "the KL is in the reward with add_token_level_kl"),
    Effect(("target_kl",), lambda c: c.add_token_level_kl, "it adapts init_kl_coef, which add_token_level_kl uses"),
    Effect(("kl_horizon",), lambda c: c.target_kl is not None, "needs target_kl"),
    Effect(("kl_loss_coef", "kl_loss_type"), lambda c: c.use_kl_loss, "needs use_kl_loss: true"),
    Effect(("reference",), lambda c: c.needs_reference, "nothing takes a KL to it; set use_kl_loss or add_token_level_kl"),
    Effect(("max_refill_factor",), lambda c: c.group_filter is not None, "needs group_filter"),
    Effect(("prompt_length", "response_length"), lambda c: not c.is_set("sequence_length"), "sequence_length is set"),
    Effect(("stale_groups",), lambda c: c.async_generation_ratio > 0, "training is synchronous"),
    Effect(("on_weight_update",), lambda c: c.async_generation_ratio > 0, "training is synchronous"),
    Effect(
        ("actor_train.max_tokens_per_microbatch_in_train",),
        lambda c: c.actor_train.use_dynamic_batching_in_train,
        "needs use_dynamic_batching_in_train: true",
    ),
    Effect(
        ("actor_train.training_args.warmup_ratio",),
        lambda c: c.actor_train.training_args.warmup_steps == 0,
        "warmup_steps is set",
    ),
    *(
        Effect((f"{manager}.{key}",), lambda _: False, "environments run in this process, between the engine's steps")
        for manager in ("train_env_manager", "val_env_manager")
        for key in ("max_env_num_per_worker", "env_step_timeout_s")
    ),
    Effect(("actor_train.generating_args",), lambda _: False, "actor_infer samples; set it there"),
    Effect(("actor_infer.training_args",), lambda _: False, "actor_train trains; set it there"),
    Effect(("reference.training_args",), lambda _: False, "a reference isn't trained"),
    *(
        Effect((f"actor_train.model_args.{key}",), lambda c: c.actor_train.model_args.lora_rank is not None, "needs lora_rank")
        for key in ("lora_alpha", "lora_dropout", "lora_target")
    ),
    *(
        Effect(
            (f"{role}.use_sequence_packing",),
            lambda c, role=role: not c.roles[role].strategy_args.strategy_name.startswith("torch_"),  # type: ignore[misc]
            "torch_train and torch_infer always pack",
        )
        for role in ("actor_train", "reference", "critic")
    ),
)


def find_ineffective(config: AgenticConfig | SFTConfig) -> list[Problem]:
    """The keys that were set without effect, each with the reason."""
    if isinstance(config, SFTConfig):
        return list(_sft(config))
    found = [
        Problem.at(key, f"has no effect: {effect.reason}.")
        for effect in EFFECTS
        for key in effect.keys
        if config.departs(key) and not effect.works(config)
    ]
    return [*found, *_environments(config)]


def ineffective(config: AgenticConfig | SFTConfig) -> list[str]:
    """A sentence for each known key that was set but changes nothing in this combination."""
    return as_sentences(find_ineffective(config))


def _environments(config: AgenticConfig) -> Iterator[Problem]:
    for tag, env in config.custom_envs.items():
        if env.is_set("history_length") and env.mode == "trajectory":
            message = "has no effect: in mode trajectory the whole history is in the context."
            yield Problem(("custom_envs", tag, "history_length"), message)
    if config.data.is_set("reward") and not config.data.train_files:
        yield Problem.at("data.reward", "has no effect: there are no data.train_files.")


def _sft(config: SFTConfig) -> Iterator[Problem]:
    if config.is_set("max_tokens_per_microbatch_in_train") and not config.use_dynamic_batching_in_train:
        yield Problem.at("max_tokens_per_microbatch_in_train", "has no effect: needs use_dynamic_batching_in_train: true.")
    if config.val_files and config.eval_steps == 0:
        yield Problem.at("val_files", "has no effect: eval_steps is 0, so nothing is validated.")
