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
    yield "loss", f"{_variant(config)}, {config.loss_agg_mode}, entropy × {config.entropy_loss_coef:g}"
    yield "KL", "; ".join(kl(config))
    if config.train_infer_correction is not None:
        yield "sampler", _correction(config.train_infer_correction)


def _variant(config: AgenticConfig) -> str:
    parts = [f"{name} {value}" for name, value in config.pg_args.items()]
    parts += [f"ratio over a {config.ratio_type}"] if config.ratio_type else []
    return f"{config.pg_variant} ({', '.join(parts)})" if parts else config.pg_variant


def _correction(correction: TrainInferCorrection) -> str:
    parts, weight = [], correction.is_weight
    if weight is not None and weight.enabled:
        parts.append(f"losses × min(ρ, {weight.upper_bound:g}) of a {weight.weight_type}")
    bands = [band for band in correction.filters if band.enabled]
    parts += [
        f"only where {band.ratio_low:g} ≤ ρ of a {band.agg_type} ≤ {band.ratio_high:g}" for band in bands
    ]
    return "; ".join(parts) or "not corrected"


def step_rows(config: AgenticConfig) -> Iterator[SettingRow]:
    manager, role = config.train_env_manager, config.actor_train
    batch, most = config.rollout_batch_size, config.max_samples_per_trajectory
    num_groups, length = batch // manager.group_size, config.sequence_length
    samples = (
        f"trajectories of at most {most} samples (mode step: one per turn)" if most > 1 else "trajectories"
    )
    tags = f"{tags_text(manager)}{few_groups_note(manager, num_groups, 'in a step')}"
    refill = (
        f"; {config.group_filter} refills at most {config.max_refill_factor:g} × as many"
        if config.group_filter
        else ""
    )
    yield (
        "one step",
        f"{batch} {samples} in {counted(num_groups, 'group')} of {manager.group_size}, from {tags}{refill}",
    )
    total = config.num_training_steps("actor_train") * config.optimizer_steps_per_batch()
    in_all = (
        f"the schedule counts {total} in all" if most > 1 else f"{counted(total, 'optimiser step')} in all"
    )
    epochs = f" in {config.ppo_epochs} passes" if config.ppo_epochs > 1 else ""
    yield "optimiser steps", f"{optimizer_steps_text(config, 'actor_train')}{epochs}; {in_all}"
    train = micro_batch_text(
        role.use_dynamic_batching_in_train, role.max_tokens_per_microbatch_in_train, role.training_args
    )
    infer = micro_batch_text(
        role.use_dynamic_batching_in_infer, role.max_tokens_per_microbatch_in_infer, role.training_args
    )
    yield "micro-batches", f"up to {train}; forward passes up to {infer}"
    sampled = f"at most {batch * most * length:,} a step, of which sampled {batch * most_sampled(config):,}"
    responses = sorted({config.max_new_tokens("train", tag) for tag in manager.tags})
    yield (
        "tokens",
        f"{sampled}; contexts of {length}, responses of {' or '.join(map(str, responses)) or 'any length'}",
    )


def micro_batch_text(by_tokens: bool, tokens: int, arguments: TrainingArgs) -> str:
    """A text: the maximum size of a micro-batch, in tokens or samples."""
    return f"{tokens} tokens" if by_tokens else f"{arguments.per_device_train_batch_size} samples"


def optimizer_steps_text(config: AgenticConfig, role: str) -> str:
    """A role's optimiser steps in one step of the pipeline, with the samples of each."""
    most, size = config.max_samples_per_trajectory, config.roles[role].samples_per_optimizer_step
    steps = str(config.optimizer_steps_per_batch(role))
    if most > 1:
        steps += f" to {config.optimizer_steps_per_batch(role, samples_per_trajectory=most)}"
    return f"{steps} × {counted(min(size, config.rollout_batch_size * most), 'sample')}"


def most_sampled(config: AgenticConfig) -> int:
    """Maximum number of tokens that one training episode can sample."""
    length, most = config.sequence_length, []
    if config.train_env_manager.has_rows:
        # With tools or users, a row has several responses, in one context.
        speaks_once = config.data.default_agent == "single_turn_agent" and not config.is_set("agent")
        num_responses = 1 if speaks_once else config.agent.max_assistant_turns or length
        most.append(min(num_responses * config.max_new_tokens("train", ROWS_TAG), length))
    for tag in config.train_env_manager.env_tags:
        env, response = config.custom_envs[tag], config.max_new_tokens("train", tag)
        most.append(
            env.max_steps * min(response, length)
            if env.mode == "step"
            else min(env.max_steps * response, length)
        )
    return max(most, default=length)


def asynchronous_text(config: AgenticConfig) -> str:
    """A text: what a weight update does to running responses, when groups are trained on, and how stale
    tokens are treated."""
    fates = {
        "finish": "are finished",
        "abort_continue": "continue with them",
        "abort_restart": "start over",
        "keep": "are kept",
    }
    trained_on = "as they end" if config.is_streamed else "when the batch is complete"
    responses = f"at new weights responses {fates[config.on_weight_update]}"
    return f"{responses}; groups are trained on {trained_on}; {stale_tokens(config)}"
