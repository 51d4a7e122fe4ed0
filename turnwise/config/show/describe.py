"""The table of the settings in force. `turnwise config` prints it without loading a model. A run prints it at
its start, with some rows replaced by what loading has found (`build.run_table`)."""

from collections.abc import Iterator

from turnwise.config.checks.missing import unavailable
from turnwise.config.checks.without_effect import ineffective
from turnwise.config.place import lent_replicas, place, smallest_machine
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.sft import SFTConfig
from turnwise.config.show.model_rows import IN_POLICY, model_text, optimizer_text, role_place, role_text
from turnwise.config.show.played_rows import data_rows, environments, sampling, validation
from turnwise.config.show.settings_table import SettingRow, SettingsTable
from turnwise.config.show.sizes import checkpoints, episodes_at_once, memory, trained_memory
from turnwise.config.show.step_rows import (
    algorithm_rows,
    asynchronous_text,
    micro_batch_text,
    optimizer_steps_text,
    step_rows,
)
from turnwise.errors import counted, nearest
from turnwise.runtime.placement import Placement
from turnwise.spec import ENVS


def describe(
    config: AgenticConfig | SFTConfig, placement: Placement | None = None, built: dict[str, str] | None = None
) -> SettingsTable:
    """The settings in force, computed from the config and the model's config.json. `placement` says where
    roles run (default: on a machine that has all devices of the config). `built` are rows of a run, by name:
    they replace rows of the same name, and an empty text removes the row. With `built`, `missing` stays
    empty."""
    if isinstance(config, SFTConfig):
        rows = dict(_sft_rows(config))
    else:
        rows = dict(_agentic_rows(config, placement or place(config, smallest_machine(config))))
    warnings = ineffective(config)
    if built is not None:
        shown = [(name, text) for name, text in (rows | built).items() if text]
        return SettingsTable(shown, warnings)
    if isinstance(config, AgenticConfig):
        warnings += _unknown_environments(config)
    return SettingsTable(list(rows.items()), warnings, unavailable(config))


def _unknown_environments(config: AgenticConfig) -> Iterator[str]:
    """Warnings about environments that aren't built in. They are no errors here, since a program may still
    register them."""
    built_in = [name for name, entry in ENVS.items() if entry]
    for tag, env in config.custom_envs.items():
        if env.env_type not in ENVS and ":" not in env.env_type:
            yield (
                f"custom_envs.{tag}.env_type: {env.env_type!r} isn't a built-in environment "
                f"({', '.join(built_in)}) nor a module:Class; train needs a program that registers it."
                f"{nearest(env.env_type, built_in)}"
            )


def _sft_rows(config: SFTConfig) -> Iterator[SettingRow]:
    shape = config.model_shape()
    arguments = config.model_args
    yield "model", model_text(arguments.model_name_or_path, shape)
    yield "training", f"{arguments.dtype}, attention {arguments.attn_implementation}"
    yield "optimiser", optimizer_text(config.training_args, config.max_grad_norm)
    steps = counted(config.num_epochs, "epoch")
    if config.max_steps:
        steps += f", at most {counted(config.max_steps, 'optimiser step')}"
    yield "steps", f"{steps}, each of {config.samples_per_optimizer_step} samples"
    tokens = config.max_tokens_per_microbatch_in_train
    train = micro_batch_text(config.use_dynamic_batching_in_train, tokens, config.training_args)
    yield (
        "micro-batches",
        f"up to {train}; forward passes up to {tokens} tokens; at most {config.sequence_length} a sample",
    )
    if shape:
        yield "memory", trained_memory(arguments, shape)
    times = "at the end"
    if config.eval_steps:
        times = f"every {counted(config.eval_steps, 'step')} and at the end"
    if not config.val_files:
        times = "never (no val_files)"
    yield "validation", times
    yield "profile", profile(config)
    yield "tracking", _tracking(config)


def _agentic_rows(config: AgenticConfig, placement: Placement) -> Iterator[SettingRow]:
    shape = config.model_shape()
    yield "model", model_text(config.actor_train.model_args.model_name_or_path, shape)
    for name, role in config.active_roles.items():
        if name == "reference" and config.is_reference_in_policy:
            yield name, IN_POLICY
        else:
            yield name, role_text(role, role_place(name, role, placement))
    yield "optimiser", optimizer_text(config.actor_train.training_args, config.max_grad_norm)
    if config.needs_critic:
        optimizer = optimizer_text(config.critic.training_args, config.max_grad_norm)
        text = f"{optimizer}; {optimizer_steps_text(config, 'critic')} a step"
        if config.critic_warmup:
            text += f"; alone for the first {counted(config.critic_warmup, 'step')}"
        yield "critic's", text
    yield from environments(config, "train")
    yield from data_rows(config)
    yield from algorithm_rows(config)
    yield from step_rows(config)
    yield "sampling", f"{sampling(config, 'train')}, {counted(episodes_at_once(config), 'episode')} at once"
    if config.plays_ahead:
        batches = "1 batch"
        if config.async_generation_ratio > 1:
            batches = f"{config.async_generation_ratio} batches"
        yield "asynchronous", f"up to {batches} ahead; {asynchronous_text(config)}"
        if lent := lent_replicas(config, placement):
            numbers = ", ".join(map(str, lent))
            noun = "replicas" if len(lent) > 1 else "replica"
            yield "lent devices", f"{noun} {numbers} of actor_infer, to training in a part of each step"
    if shape:
        yield "memory", memory(config, shape, placement)
        yield "checkpoints", checkpoints(config, shape)
    yield "validation", validation(config)
    yield "profile", profile(config)
    yield "tracking", _tracking(config)


def profile(config: AgenticConfig | SFTConfig) -> str:
    """A text: whether two runs of the config are bit-identical, and the seed."""
    if not config.deterministic:
        return f"bit-identity isn't promised (deterministic: true asks for it), seed {config.seed}"
    text = "deterministic"
    if config.plays_ahead:
        text += ", bit-identical when it is replayed (train --replay)"
    return f"{text}, seed {config.seed}"


def _tracking(config: AgenticConfig | SFTConfig) -> str:
    return ", ".join(["metrics.jsonl", *config.track_with])
