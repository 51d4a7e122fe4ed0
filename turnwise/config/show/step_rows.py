"""What the table says of the algorithm, and of one step of the pipeline."""

from collections.abc import Iterator

from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.algorithm import TrainInferCorrection
from turnwise.config.schema.model_args import TrainingArgs
from turnwise.config.show.phrases import advantages, kl, stale_tokens
from turnwise.config.show.played_rows import few_groups_note, tags_text
from turnwise.config.show.settings_table import SettingRow
from turnwise.errors import counted
from turnwise.spec import ROWS_TAG


def algorithm_rows(config: AgenticConfig) -> Iterator[SettingRow]:
    yield "advantages", ", ".join(advantages(config))
    yield "loss", f"{_variant(config)}, {config.loss_agg_mode}, entropy × {_bonus(config)}"
    yield "KL", "; ".join(kl(config))
    if config.train_infer_correction is not None:
        yield "sampler", _correction(config.train_infer_correction)


def _bonus(config: AgenticConfig) -> str:
    weight = f"{config.entropy_loss_coef:g}"
    if config.target_entropy is None:
        return weight
    return f"{weight} falling to 0 at {config.target_entropy:g} nats per token"


def _variant(config: AgenticConfig) -> str:
    parts = [f"{name} {value}" for name, value in config.pg_args.items()]
    if config.ratio_type:
        parts.append(f"ratio over a {config.ratio_type}")
    if not parts:
        return config.pg_variant
    return f"{config.pg_variant} ({', '.join(parts)})"


def _correction(correction: TrainInferCorrection) -> str:
    parts: list[str] = []
    weight = correction.is_weight
    if weight is not None and weight.enabled:
        parts.append(f"losses × min(ρ, {weight.upper_bound:g}) of a {weight.weight_type}")
    bands = [band for band in correction.filters if band.enabled]
    parts += [
        f"only where {band.ratio_low:g} ≤ ρ of a {band.agg_type} ≤ {band.ratio_high:g}" for band in bands
    ]
    return "; ".join(parts) or "not corrected"


def step_rows(config: AgenticConfig) -> Iterator[SettingRow]:
    role = config.actor_train
    yield "one step", _step(config)
    yield "optimiser steps", _optimizer_steps(config)
    train = micro_batch_text(
        role.use_dynamic_batching_in_train, role.max_tokens_per_microbatch_in_train, role.training_args
    )
    infer = micro_batch_text(
        role.use_dynamic_batching_in_infer, role.max_tokens_per_microbatch_in_infer, role.training_args
    )
    yield "micro-batches", f"up to {train}; forward passes up to {infer}"
    yield "tokens", _tokens(config)


def _step(config: AgenticConfig) -> str:
    """A text: the trajectories of one step."""
    manager = config.train_env_manager
    num_groups = config.rollout_batch_size // manager.group_size
    trajectories = "trajectories"
    if config.max_samples_per_trajectory > 1:
        num_samples = config.max_samples_per_trajectory
        trajectories += f" of at most {num_samples} samples (mode step: one per turn)"
    tags = f"{tags_text(manager)}{few_groups_note(manager, num_groups, 'in a step')}"
    groups = f"{counted(num_groups, 'group')} of {manager.group_size}"
    text = f"{config.rollout_batch_size} {trajectories} in {groups}, from {tags}"
    if config.group_filter:
        text += f"; {config.group_filter} refills at most {config.max_refill_factor:g} × as many"
    return text


def _optimizer_steps(config: AgenticConfig) -> str:
    """A text: the optimiser steps of one step, and of the run."""
    text = optimizer_steps_text(config, "actor_train")
    if config.ppo_epochs > 1:
        text += f" in {config.ppo_epochs} passes"
    total = config.num_training_steps("actor_train") * config.optimizer_steps_per_batch()
    if config.max_samples_per_trajectory > 1:
        return f"{text}; the schedule counts {total} in all"
    return f"{text}; {counted(total, 'optimiser step')} in all"


def _tokens(config: AgenticConfig) -> str:
    """A text: the maximum tokens of one step, of its contexts and of its responses."""
    batch = config.rollout_batch_size
    length = config.sequence_length
    total = batch * config.max_samples_per_trajectory * length
    num_sampled = batch * most_sampled(config)
    limits = sorted({config.max_new_tokens("train", tag) for tag in config.train_env_manager.tags})
    responses = " or ".join(map(str, limits)) or "any length"
    return (
        f"at most {total:,} a step, of which sampled {num_sampled:,}; contexts of {length}, responses of "
        f"{responses}"
    )


def micro_batch_text(by_tokens: bool, tokens: int, arguments: TrainingArgs) -> str:
    """A text: the maximum size of a micro-batch, in tokens or samples."""
    if by_tokens:
        return f"{tokens} tokens"
    return f"{arguments.per_device_train_batch_size} samples"


def optimizer_steps_text(config: AgenticConfig, role: str) -> str:
    """A role's optimiser steps in one step of the pipeline, with the samples of each."""
    num_samples = config.max_samples_per_trajectory
    steps = str(config.optimizer_steps_per_batch(role))
    if num_samples > 1:
        steps += f" to {config.optimizer_steps_per_batch(role, samples_per_trajectory=num_samples)}"
    size = min(config.roles[role].samples_per_optimizer_step, config.rollout_batch_size * num_samples)
    return f"{steps} × {counted(size, 'sample')}"


def most_sampled(config: AgenticConfig) -> int:
    """Maximum number of tokens that one training episode can sample."""
    limits: list[int] = []
    length = config.sequence_length
    if config.train_env_manager.has_rows:
        # With tools or users, a row has several responses, in one context.
        speaks_once = config.data.default_agent == "single_turn_agent" and not config.is_set("agent")
        num_responses = 1 if speaks_once else config.agent.max_assistant_turns or length
        limits.append(min(num_responses * config.max_new_tokens("train", ROWS_TAG), length))
    for tag in config.train_env_manager.env_tags:
        env = config.custom_envs[tag]
        response = config.max_new_tokens("train", tag)
        if env.mode == "step":
            limits.append(env.max_steps * min(response, length))
        else:
            limits.append(min(env.max_steps * response, length))
    return max(limits, default=length)


def asynchronous_text(config: AgenticConfig) -> str:
    """A text: what a weight update does to running responses, when groups are trained on, and how stale
    tokens are treated."""
    fates = {
        "finish": "are finished",
        "abort_continue": "continue with them",
        "abort_restart": "start over",
        "keep": "are kept",
    }
    moment = "as they end" if config.is_streamed else "when the batch is complete"
    responses = f"at new weights responses {fates[config.on_weight_update]}"
    return f"{responses}; groups are trained on {moment}; {stale_tokens(config)}"
