"""Describes what a config will do, before anything is loaded, for `turnwise config`.

`build.run_table` describes what a run really does, from its objects; facts that no object knows are worded here for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd

from turnwise.config.algorithm import TrainInferCorrection
from turnwise.config.environments import EnvManager
from turnwise.config.missing import unavailable
from turnwise.config.model_shape import BYTES, ModelShape, read_model_shape
from turnwise.config.resolve import estimator_of
from turnwise.config.roles import ModelArgs, Role, TrainingArgs
from turnwise.config.rows import data_rows
from turnwise.config.schema import AgenticConfig, Split
from turnwise.config.sft import SFTConfig
from turnwise.config.smaller import bytes_text, checkpoints
from turnwise.config.without_effect import ineffective
from turnwise.errors import counted, nearest
from turnwise.hub import looks_like_hub_name
from turnwise.model_folder import base_of_adapter, folder_here
from turnwise.spec import ENVS, MAX_PACKED_BYTES, ROWS_TAG, STRATEGIES

TRAINED_BYTES = 16
"""Bytes of a trained parameter: fp32 weight, gradient and the two moments of Adam."""

Row = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Applied:
    """The settings in force: `(name, text)` rows, warnings, and missing features or libraries."""

    rows: list[Row]
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def table(self) -> str:
        """The rows as aligned lines."""
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in self.rows)

    def render(self) -> str:
        """The table, then the warnings and the missing features."""
        lines = [self.table(), *(f"warning: {warning}" for warning in self.warnings)]
        lines += ["missing to run this config here:", *(f"  - {line}" for line in self.missing)] if self.missing else []
        return "\n".join(lines)


def describe(config: AgenticConfig | SFTConfig) -> Applied:
    """The settings in force, computed from the config and the model's config.json."""
    rows = list(_sft_rows(config) if isinstance(config, SFTConfig) else _agentic_rows(config))
    return Applied(rows, [*ineffective(config), *_unknown_environments(config)], unavailable(config))


def _unknown_environments(config: AgenticConfig | SFTConfig) -> Iterator[str]:
    """Names that are no built-in environment. A program may register them before it builds, so they are no error here."""
    for tag, env in config.custom_envs.items() if isinstance(config, AgenticConfig) else ():
        if env.env_type not in ENVS and ":" not in env.env_type:
            known = [name for name, entry in ENVS.items() if entry]
            yield (
                f"custom_envs.{tag}.env_type: {env.env_type!r} is no built-in environment ({', '.join(known)}) and no "
                f"module:Class; train needs a program that registers it.{nearest(env.env_type, known)}"
            )


def _sft_rows(config: SFTConfig) -> Iterator[Row]:
    shape = config.model_shape()
    yield "model", _model(config.model_args.model_name_or_path, shape)
    batching = f"up to {config.max_tokens_per_microbatch_in_train} tokens" if config.use_dynamic_batching_in_train else "padded"
    yield "optimiser step", f"{config.samples_per_optimizer_step} samples, micro-batches {batching}"
    limit = f", at most {counted(config.max_steps, 'optimiser step')}" if config.max_steps else ""
    yield "epochs", f"{config.num_epochs}{limit}; samples of at most {config.sequence_length} tokens"
    yield "learning rate", _learning_rate(config.training_args, config.max_grad_norm)
    yield "precision", f"{config.model_args.dtype}, attention {config.model_args.attn_implementation}"
    if shape:
        yield "memory", _trained_memory(config.model_args, shape)
    yield "tracking", tracking(config)


def _agentic_rows(config: AgenticConfig) -> Iterator[Row]:
    shape = config.model_shape()
    yield "model", _model(config.actor_train.model_args.model_name_or_path, shape)
    for name, role in config.active_roles.items():
        in_policy = name == "reference" and config.is_reference_in_policy
        is_apart = config.trains_apart and name in config.device_mappings
        where = "in the trainer's process" if is_apart else "in this process"
        yield name, "the policy's own weights with the adapter off" if in_policy else _role(role, where)
    yield from data_rows(config)
    yield from algorithm_rows(config)
    yield from _step(config)
    yield "sampling", f"{sampling(config, 'train')}, {counted(_episodes_at_once(config), 'episode')} at once"
    if config.plays_ahead:
        ratio = config.async_generation_ratio
        batches = "1 batch" if ratio == 1 else f"{ratio} batches"
        yield "asynchronous", f"up to {batches} ahead; {asynchronous(config)}"
    training = config.actor_train.training_args
    yield "learning rate", _learning_rate(training, config.max_grad_norm)
    if config.needs_critic:
        yield "critic's", _critic(config)
    if shape:
        yield "memory", _memory(config, shape)
        yield "checkpoints", checkpoints(config, shape)
    yield "validation", validation(config)
    yield "profile", "deterministic" if config.deterministic else "not asked to be bit-identical (deterministic: true asks)"
    yield "tracking", tracking(config)


def tracking(config: AgenticConfig | SFTConfig) -> str:
    """The trackers that metrics go to."""
    return ", ".join(["metrics.jsonl", *config.track_with])


def _model(path: str, shape: ModelShape | None) -> str:
    if shape is None:
        found = "not a folder here, so its size isn't known"
        if folder_here(path):
            found = "a shape that this table doesn't know"
        elif looks_like_hub_name(path):
            found = "not on this machine: train downloads it from the hub"
        return f"{path} ({found})"
    size = shape.num_parameters
    shown = f"{size / 1e9:.2f} B" if size >= 1e9 else f"{size / 1e6:.2f} M"
    base = base_of_adapter(path)
    start = path if base is None else f"{path}, an adapter merged into {base}"
    return f"{start}: {shape.architecture}, {shown} parameters, context {shape.context_length}"


def _role(role: Role, where: str) -> str:
    kind = STRATEGIES[role.strategy_args.strategy_name].kind
    if role.device_mapping is not None:
        where = f"a {'server' if kind == 'sampling' else 'process'} for each of devices {_ranks(role.device_mapping)}"
        where = where if len(role.device_mapping) > 1 else f"device {role.device_mapping[0]}"
    arguments = role.model_args
    parts = [role.strategy_args.strategy_name, where, arguments.dtype, f"attention {arguments.attn_implementation}"]
    if kind == "train" and arguments.lora_rank is not None:
        parts.append(f"LoRA rank {arguments.lora_rank}")
    if kind == "train" and arguments.freeze_module_prefix:
        parts.append(f"frozen: {', '.join(arguments.freeze_module_prefix)}")
    return ", ".join(parts)


def _ranks(ranks: list[int]) -> str:
    is_run = ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2
    return f"{ranks[0]}–{ranks[-1]}" if is_run else ", ".join(str(rank) for rank in ranks)


def algorithm_rows(config: AgenticConfig) -> Iterator[Row]:
    """Advantages, loss and KL."""
    normalization = config.reward_normalization
    estimator = estimator_of(config)
    mean, std = normalization.statistics
    if estimator.normalization == "own":
        scaling = "scores centred in its own way"
    elif mean == std == "none":
        scaling = "scores as they are"
    else:
        over = f"over {normalization.grouping}"
        scaling = f"{normalization.method} {over} (mean: {mean}, deviation: {std})"
    parts = [config.adv_estimator, scaling]
    if not estimator.is_own:
        parts += list(_discounts(config))
    parts += ["advantages whitened"] if config.whiten_advantages or estimator.whitens_advantages else []
    parts += [f"rewards clipped to ±{config.reward_clip:g}"] if config.reward_clip else []
    parts += [f"advantages clipped to ±{config.advantage_clip:g}"] if config.advantage_clip else []
    yield "advantages", ", ".join(parts)
    yield "loss", f"{_variant(config)}, {config.loss_agg_mode}, entropy × {config.entropy_loss_coef:g}"
    yield "KL", _kl(config)
    if config.train_infer_correction is not None:
        yield "sampler", _correction(config.train_infer_correction)


def _discounts(config: AgenticConfig) -> Iterator[str]:
    estimator = estimator_of(config)
    if estimator.has_td_errors:
        yield f"γ {config.gamma:g} and λ {config.lambd:g} a {config.gae_granularity}"
    elif estimator.discounts:
        yield f"γ {config.gamma:g}"
    if estimator.has_step_returns:
        yield f"step returns with γ {config.step_reward_gamma:g} a turn"
    if estimator.mixes_step_advantages:
        yield f"{config.episode_reward_weight:g} × episode + {config.step_reward_weight:g} × step"


def _variant(config: AgenticConfig) -> str:
    parts = [f"{name} {value}" for name, value in config.pg_args.items()]
    parts += [f"ratio over a {config.ratio_type}"] if config.ratio_type else []
    return f"{config.pg_variant} ({', '.join(parts)})" if parts else config.pg_variant


def _correction(correction: TrainInferCorrection) -> str:
    parts, weight = [], correction.is_weight
    if weight is not None and weight.enabled:
        parts.append(f"losses × min(ρ, {weight.upper_bound:g}) of a {weight.weight_type}")
    for band in correction.filters:
        if band.enabled:
            parts.append(f"only where {band.ratio_low:g} ≤ ρ of a {band.agg_type} ≤ {band.ratio_high:g}")
    return "; ".join(parts) or "not corrected"


def _kl(config: AgenticConfig) -> str:
    parts = []
    if config.add_token_level_kl:
        target = f", adapted to {config.target_kl:g} nats a token" if config.target_kl else ""
        parts.append(f"{config.init_kl_coef:g} × {config.kl_penalty} from the reward{target}")
    if config.use_kl_loss:
        parts.append(f"{config.kl_loss_coef:g} × {config.kl_loss_type} in the loss")
    return "; ".join(parts) or "none, so no reference model"


def _step(config: AgenticConfig) -> Iterator[Row]:
    manager = config.train_env_manager
    batch, group = config.rollout_batch_size, manager.group_size
    most = config.max_samples_per_trajectory
    samples = f"trajectories of at most {most} samples (mode step: one a turn)" if most > 1 else "trajectories"
    epochs = f" in {config.ppo_epochs} passes" if config.ppo_epochs > 1 else ""
    few = _few(manager, batch // group, "in a step")
    refill = f"; {config.group_filter} refills at most {config.max_refill_factor:g} × as many" if config.group_filter else ""
    yield (
        "one step",
        f"{batch} {samples} in {counted(batch // group, 'group')} of {group}, from {tags_of(manager)}{few}{refill}",
    )
    total = config.num_training_steps("actor_train") * config.optimizer_steps_per_batch()
    in_all = f"the schedule counts {total} in all" if most > 1 else f"{counted(total, 'optimiser step')} in all"
    yield "optimiser", f"{_optimizer_steps(config, 'actor_train')}{epochs}; {in_all}"
    yield (
        "tokens",
        (
            f"at most {batch * most * config.sequence_length:,} a step, of which sampled {batch * most_sampled(config):,}; "
            f"contexts of {config.sequence_length}, responses of {_responses(config)}"
        ),
    )


def _episodes_at_once(config: AgenticConfig) -> int:
    """Training episodes that play at once. Redundant siblings and greedy ones are played too."""
    manager, has_greedy = config.train_env_manager, "greedy_sibling" in estimator_of(config).needs
    return manager.num_env_groups * (manager.group_size + manager.group_size_redundancy + has_greedy)


def _optimizer_steps(config: AgenticConfig, role: str) -> str:
    """Optimiser steps of one pipeline step, with the samples of each."""
    most, size = config.max_samples_per_trajectory, config.roles[role].samples_per_optimizer_step
    steps = str(config.optimizer_steps_per_batch(role))
    if most > 1:
        steps += f" to {config.optimizer_steps_per_batch(role, samples_per_trajectory=most)}"
    return f"{steps} × {counted(min(size, config.rollout_batch_size * most), 'sample')}"


def most_sampled(config: AgenticConfig) -> int:
    """Tokens that one episode of training can sample."""
    length, most = config.sequence_length, []
    if config.train_env_manager.has_rows:
        most.append(min(config.max_new_tokens("train", ROWS_TAG), length))
    for tag in config.train_env_manager.env_tags:
        env, response = config.custom_envs[tag], config.max_new_tokens("train", tag)
        most.append(env.max_steps * min(response, length) if env.mode == "step" else min(env.max_steps * response, length))
    return max(most, default=length)


def _responses(config: AgenticConfig) -> str:
    lengths = sorted({config.max_new_tokens("train", tag) for tag in config.train_env_manager.tags})
    return " or ".join(str(length) for length in lengths) or "any length"


def sampling(config: AgenticConfig, split: Split) -> str:
    """How a split draws its tokens."""
    arguments = config.sampling(split)
    if arguments.is_greedy:
        return "greedy"
    text = f"temperature {arguments.temperature:g}"
    if arguments.is_truncated:
        text += f", cut to top_p {arguments.top_p:g}, top_k {arguments.top_k}, min_p {arguments.min_p:g}"
        text += f", repetition_penalty {arguments.repetition_penalty:g}"
    return text


def _learning_rate(arguments: TrainingArgs, max_grad_norm: float) -> str:
    warmup = f"{arguments.warmup_ratio:.0%} of all" if arguments.warmup_ratio and not arguments.warmup_steps else ""
    warmup = warmup or str(arguments.warmup_steps)
    return (
        f"{arguments.learning_rate:g}, {arguments.lr_scheduler_type}, warm-up {warmup} steps, "
        f"weight decay {arguments.weight_decay:g}, gradients clipped to norm {max_grad_norm:g}"
    )


def _critic(config: AgenticConfig) -> str:
    alone = f"; alone for the first {counted(config.critic_warmup, 'step')}" if config.critic_warmup else ""
    return (
        f"{_learning_rate(config.critic.training_args, config.max_grad_norm)}; "
        f"{_optimizer_steps(config, 'critic')} a step{alone}"
    )


def asynchronous(config: AgenticConfig) -> str:
    """The treatment of responses that are being sampled when weights change, of groups and of stale tokens."""
    fates = {"finish": "are finished", "abort_continue": "go on with them", "abort_restart": "start over", "keep": "are kept"}
    trained_on = "as they end" if config.is_streamed else "when the batch is whole"
    responses = f"at new weights responses {fates[config.on_weight_update]}"
    return f"{responses}; groups are trained on {trained_on}; {_of_stale_tokens(config)}"


def _of_stale_tokens(config: AgenticConfig) -> str:
    """The treatment of tokens of older versions."""
    if config.use_rollout_log_probs:
        return "ratios are to the policies that sampled"
    asked = config.train_infer_correction
    if asked is not None and ((asked.is_weight and asked.is_weight.enabled) or any(band.enabled for band in asked.filters)):
        return "stale tokens are corrected by train_infer_correction"
    return "stale tokens are trained on as they are (train_infer_correction corrects them)"


def _memory(config: AgenticConfig, shape: ModelShape) -> str:
    """An estimate without activations. The sampler reads the trainer's fp32 weights where it wants them so, always new, and
    nothing trains while it plays."""
    num = shape.num_parameters
    policy = config.actor_train.model_args
    parts = [_trained_memory(policy, shape)]
    if config.needs_critic:
        critic = read_model_shape(config.critic.model_args.model_name_or_path) or shape
        parts.append(f"{bytes_text(_critic_memory(config.critic.model_args, critic))} critic")
    if config.needs_reference and not config.is_reference_in_policy:
        parts.append(f"{bytes_text(4 * num)} reference")
    dtype = config.actor_infer.model_args.dtype
    is_late = config.actor_train.model_update_frequency > 1 or config.plays_ahead
    if dtype != "fp32" or is_late or policy.has_adapter:
        parts.append(f"{bytes_text(BYTES[dtype] * num)} sampler")
    if config.plays_ahead:
        parts.append(f"{bytes_text(4 * num)} on the way from the trainer's process")
    episodes = _episodes_at_once(config)
    kv = shape.kv_bytes_per_token(dtype) * config.sequence_length * episodes
    sampler = config.actor_infer.strategy_args.strategy_name
    bound = config.kv_cache_bytes if sampler == "embedded" else kv
    parts.append(f"at most {bytes_text(min(kv, bound))} keys and values of {episodes} contexts")
    if bound < kv:
        parts[-1] += f" (kv_cache_bytes; all of them would be {bytes_text(kv)})"
    if sampler == "embedded" and dtype == "fp32" and BYTES[dtype] * num <= MAX_PACKED_BYTES:
        parts.append(f"on a CPU about {bytes_text(BYTES[dtype] * num)} weights packed for its kernels")
    return ", ".join(parts) + " (estimated; activations come on top)"


def _trained_memory(arguments: ModelArgs, shape: ModelShape) -> str:
    num = shape.num_parameters
    if arguments.lora_rank is None:
        most = "at most " if arguments.freeze_module_prefix else ""
        return f"{most}{bytes_text(TRAINED_BYTES * num)} weights, gradients, optimiser"
    adapters = shape.num_lora_parameters(arguments.lora_rank, arguments.lora_target or ["all"])
    return f"{bytes_text(BYTES['fp32'] * num)} frozen weights, {bytes_text(TRAINED_BYTES * adapters)} adapters to be trained"


def _critic_memory(arguments: ModelArgs, shape: ModelShape) -> int:
    if arguments.lora_rank is None:
        return TRAINED_BYTES * shape.num_value_parameters
    adapters = shape.num_lora_parameters(arguments.lora_rank, arguments.lora_target or ["all"])
    return BYTES["fp32"] * shape.num_value_parameters + TRAINED_BYTES * adapters


def validation(config: AgenticConfig) -> str:
    """How often, and on what."""
    if not config.uses_validation:
        return "never (eval_steps 0)"
    manager = config.val_env_manager
    few = _few(manager, config.val_batch_size // manager.group_size, "in validation, always the same ones")
    trajectories = f"{config.val_batch_size} trajectories from {tags_of(manager)}{few}"
    parts = [f"every {counted(config.eval_steps, 'step')}, {sampling(config, 'val')}, {trajectories}"]
    if config.save_best:
        parts.append(f"the model with the best {config.save_best.metric} ({config.save_best.mode}) goes to best")
    if config.early_stopping:
        parts.append(f"{counted(config.early_stopping.patience, 'validation')} without a better one end the run")
    return "; ".join(parts)


def _shares(manager: EnvManager) -> dict[str, int]:
    """The tags that play, with their groups in one round of the partition."""
    return {tag: share for tag, share in zip(manager.tags, manager.num_groups_partition, strict=True) if share}


def tags_of(manager: EnvManager) -> str:
    """The tags that play, with their shares if there are several."""
    shares = _shares(manager)
    if len(shares) < 2:
        return ", ".join(shares)
    common = gcd(*shares.values())
    return f"{', '.join(shares)} (groups {' : '.join(str(share // common) for share in shares.values())})"


def _few(manager: EnvManager, num_groups: int, where: str) -> str:
    num_tags = len(_shares(manager))
    return f"; {num_groups} groups hold at most {num_groups} of the {num_tags} tags {where}" if num_groups < num_tags else ""
