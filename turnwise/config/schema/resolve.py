"""Fills in settings that the user left unset and that follow from other settings, so that no other code has
to derive them."""

from collections.abc import Iterator
from typing import Any

from turnwise.config.schema.keys import AgenticKeys
from turnwise.config.schema.model_args import ROLES, ModelArgs
from turnwise.config.schema.running import RunKeys
from turnwise.spec import AGENT_ALIASES, AGENTS, DEFAULT_STEP_TEMPLATE, DEFAULT_TURN_TEMPLATE, ROWS_TAG

DEFAULT_SEQUENCE_LENGTH = 4096
_LEAST_TOKENS_OF_MICROBATCH = 4096  # in smaller passes, launching an operation takes longer than computing it


def resolve(config: AgenticKeys) -> None:
    """Fills every derived field of the config and its sections."""
    config.fill(reward_pretrain=config.pretrain)
    _resolve_algorithm(config)
    _resolve_roles(config)
    if config.prompt_length and config.response_length:
        config.fill(sequence_length=config.prompt_length + config.response_length)
    else:
        resolve_sequence_length(config, config.actor_train.model_args)
    _resolve_environments(config)
    tokens = tokens_of_microbatch(config.sequence_length)
    for role in config.roles.values():
        role.fill(max_tokens_per_microbatch_in_train=tokens, max_tokens_per_microbatch_in_infer=tokens)
    is_fp32 = config.actor_train.model_args.dtype == config.actor_infer.model_args.dtype == "fp32"
    config.fill(parity_max_logprob_diff=1e-3 if is_fp32 else 0.1)
    if config.trace.backend == "mlflow":
        config.trace.fill(max_samples_per_step=1)
    agents = {env.agent_name for env in config.custom_envs.values()}
    # A user's own estimator or agent may need whole batches.
    is_known = not config.estimator.is_own and agents <= AGENTS.keys() | AGENT_ALIASES.keys()
    needs_batch = not is_known or any(streaming_obstacles(config)) or _shares_some_devices(config)
    config.fill(stream_training=config.plays_ahead and not needs_batch)


def _shares_some_devices(config: AgenticKeys) -> bool:
    """Whether some devices of `actor_infer` train too, and some don't. The replicas there make room for
    training once a step, when its batch is complete."""
    trained = set(config.actor_train.device_mapping or ())
    served = set(config.actor_infer.device_mapping or ())
    return not trained.isdisjoint(served) and not served <= trained


def resolve_model(
    arguments: ModelArgs, path: str, model_type: str, dtype: str, policy: ModelArgs | None = None
) -> None:
    """Fills in a role's model arguments. Copies `trust_remote_code` and `allow_pickle` from a `policy` with
    the same model."""
    arguments.fill(model_name_or_path=path, model_type=model_type, dtype=dtype)
    is_same = policy is not None and policy.model_name_or_path == arguments.model_name_or_path
    for key in ("trust_remote_code", "allow_pickle"):
        arguments.fill(**{key: bool(is_same and policy.__dict__[key])})
    if arguments.lora_rank is not None:
        arguments.fill(lora_alpha=2.0 * arguments.lora_rank)
        if arguments.lora_alpha is None:  # `null` counts as set for `fill`
            object.__setattr__(arguments, "lora_alpha", 2.0 * arguments.lora_rank)


def tokens_of_microbatch(sequence_length: int) -> int:
    """Default of `max_tokens_per_microbatch_in_train` and `max_tokens_per_microbatch_in_infer`."""
    return max(2 * sequence_length, _LEAST_TOKENS_OF_MICROBATCH)


def resolve_sequence_length(config: RunKeys, model: ModelArgs) -> None:
    """Fills `sequence_length` with the model's context length, at most 4096, or with 4096 if the model's
    isn't known."""
    length = DEFAULT_SEQUENCE_LENGTH
    if model.shape:
        length = min(model.shape.context_length, length)
    config.fill(sequence_length=length)


def streaming_obstacles(config: AgenticKeys) -> Iterator[str]:
    """Why a step can't be trained on group by group: a clause for each setting that needs the whole batch."""
    estimator = config.estimator
    normalization = config.reward_normalization
    strategy = config.actor_train.strategy_args
    obstacle = strategy.spec.lacks.get("streamed_parts")
    if obstacle:
        yield f"{strategy.strategy_name} takes no step in parts: {obstacle}"
    needs_batch = not {"batch", "running"}.isdisjoint(normalization.statistics)
    is_beyond_group = needs_batch or normalization.grouping != "traj_group_id"
    if "values" in estimator.needs:
        yield f"adv_estimator {config.adv_estimator} trains a critic"
    if estimator.mixes_groups:
        yield f"adv_estimator {config.adv_estimator} scales advantages by the whole batch"
    if config.whiten_rewards or config.whiten_advantages or estimator.whitens_advantages:
        yield "whitening is over the whole batch"
    if normalization.changes_scores and is_beyond_group:
        yield "reward_normalization looks beyond a group"
    if config.add_token_level_kl and config.target_kl is not None:
        yield "target_kl adapts to whole batches"
    if config.target_entropy is not None:
        yield "target_entropy measures whole steps"
    if config.variant.chooses_tokens:
        yield f"pg_variant {config.pg_variant} chooses among the tokens of a whole step"
    num_steps = config.optimizer_steps_per_batch(samples_per_trajectory=config.max_samples_per_trajectory)
    if num_steps > 1:
        num_samples = config.max_samples_per_trajectory * config.rollout_batch_size
        yield (
            f"a batch makes up to {num_steps} optimiser steps (ppo_epochs {config.ppo_epochs} × "
            f"⌈{num_samples} samples / {config.actor_train.samples_per_optimizer_step}⌉, actor_train's "
            "per_device_train_batch_size × gradient_accumulation_steps), and it must be one"
        )


def _resolve_algorithm(config: AgenticKeys) -> None:
    estimator = config.estimator
    variant = config.variant
    config.fill(
        lambd=0.95 if config.gae_granularity == "turn" else 1.0,
        loss_agg_mode=variant.aggregation,
    )
    if estimator.reward_placement != "score":
        config.fill(reward_placement=estimator.reward_placement)
    if estimator.normalization == "own":
        config.reward_normalization.fill(grouping="traj_group_id", method="identity")
    else:
        grouping, method = estimator.normalization
        config.reward_normalization.fill(grouping=grouping, method=method)
    pg_args = {**variant.parameters, **published_clips(config), **(config.pg_args or {})}
    object.__setattr__(config, "pg_args", pg_args)


def published_clips(config: AgenticKeys) -> dict[str, Any]:
    """The `pg_args` that the keys `pg_clip`, … and `dual_clip_loss` set. Leaves out parameters that the loss
    variant lacks."""
    low = high = config.pg_clip
    if config.use_pg_clip_range:
        low = config.pg_clip_low or low
        high = config.pg_clip_high or high
    clips: dict[str, Any] = {}
    if low is not None:
        clips["clip_low"] = low
    if high is not None:
        clips["clip_high"] = high
    if not config.dual_clip_loss:
        clips["dual_clip"] = None
    return {name: value for name, value in clips.items() if name in config.variant.parameters}


def _resolve_roles(config: AgenticKeys) -> None:
    policy = config.actor_train.model_args
    policy.fill(model_name_or_path=config.pretrain, dtype="fp32")
    paths = {
        "actor_infer": policy.model_name_or_path,
        "critic": config.reward_pretrain,
        "reward": config.reward_pretrain,
    }
    for name, role in config.roles.items():
        has_head = name in ("critic", "reward")
        strategy_of = name
        if name == "reward" and config.has_own_judge:  # a judge writes text, as the policy does
            has_head = False
            strategy_of = "actor_infer"
        head = "token_classification" if has_head else "causal_lm"
        dtype = "fp32" if name == "actor_train" else policy.dtype
        resolve_model(role.model_args, paths.get(name, config.pretrain), head, dtype, policy)
        role.strategy_args.fill(strategy_name=ROLES[strategy_of]["strategy"])
        role.training_args.fill(learning_rate=1e-6 if role.model_args.lora_rank is None else 1e-5)


def equal_partition(num_groups: int, num_tags: int) -> list[int]:
    """Numbers of groups per tag, as equal as possible, with the larger ones first.

    >>> equal_partition(8, 3)
    [3, 3, 2]
    """
    if num_tags == 0:
        return []
    share, num_larger = divmod(num_groups, num_tags)
    return [share + (index < num_larger) for index in range(num_tags)]


def _resolve_environments(config: AgenticKeys) -> None:
    for env in config.custom_envs.values():
        template = DEFAULT_STEP_TEMPLATE if env.mode == "step" else DEFAULT_TURN_TEMPLATE
        env.fill(agent_template=template)
    tags = list(config.custom_envs)
    if config.data.train_files:
        tags.append(ROWS_TAG)
    train = config.train_env_manager
    train.fill(tags=tags)
    val_tags = [tag for tag in train.tags if tag != ROWS_TAG or config.data.val_files]
    val = config.val_env_manager
    val.fill(tags=val_tags, group_size=1)
    for manager in (train, val):
        manager.fill(num_groups_partition=equal_partition(manager.num_env_groups, len(manager.tags)))
