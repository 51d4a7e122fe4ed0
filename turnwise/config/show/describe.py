"""The table of the settings in force. `turnwise config` prints it without loading a model. A run prints it at
its start, with some rows replaced by what loading has found (`build.run_table`)."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from shutil import get_terminal_size
from textwrap import fill
from typing import TextIO

from turnwise.config.checks.missing import unavailable
from turnwise.config.checks.without_effect import ineffective
from turnwise.config.place import place, smallest_machine
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.algorithm import TrainInferCorrection
from turnwise.config.schema.environments import EnvManager
from turnwise.config.schema.model_args import Role, TrainingArgs
from turnwise.config.schema.model_shape import ModelShape
from turnwise.config.schema.sft import SFTConfig
from turnwise.config.show.phrases import advantages, kl, stale_tokens
from turnwise.config.show.sizes import checkpoints, episodes_at_once, memory, trained_memory
from turnwise.errors import counted, nearest
from turnwise.model_files.folder import base_of_adapter, folder_here
from turnwise.model_files.hub import looks_like_hub_name
from turnwise.runtime.placement import Placement
from turnwise.spec import ENVS, ROWS_TAG, STRATEGIES, Split

SettingRow = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """The settings in force: `(name, text)` rows, warnings, and missing features or libraries."""

    rows: list[SettingRow]
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def text(self, width: int = sys.maxsize) -> str:
        """The rows, aligned, in lines of at most `width` characters."""
        indent = max(len(name) for name, _ in self.rows) + 2
        return "\n".join(
            fill(
                text,
                width,
                initial_indent=name.ljust(indent),
                subsequent_indent=" " * indent,
                break_on_hyphens=False,
            )
            for name, text in self.rows
        )

    def show(self, file: TextIO | None = None) -> None:
        """Prints the table without the warnings to `file` (default: stdout), as wide as the terminal if
        `file` is one."""
        file = file or sys.stdout
        print(
            self.text(max(get_terminal_size().columns, 40)) if file.isatty() else self.text(),
            file=file,
            flush=True,
        )

    def render(self) -> str:
        """The table, then the warnings and what is missing."""
        lines = [self.text(), *(f"warning: {warning}" for warning in self.warnings)]
        lines += (
            ["missing to run this config here:", *(f"  - {line}" for line in self.missing)]
            if self.missing
            else []
        )
        return "\n".join(lines)


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
    if built is not None:
        return SettingsTable(
            [(name, text) for name, text in (rows | built).items() if text], ineffective(config)
        )
    return SettingsTable(
        [*rows.items()], [*ineffective(config), *_unknown_environments(config)], unavailable(config)
    )


def _unknown_environments(config: AgenticConfig | SFTConfig) -> Iterator[str]:
    """Warnings about environments that aren't built in. They are no errors here, since a program may still
    register them."""
    for tag, env in config.custom_envs.items() if isinstance(config, AgenticConfig) else ():
        if env.env_type not in ENVS and ":" not in env.env_type:
            known = [name for name, entry in ENVS.items() if entry]
            yield (
                f"custom_envs.{tag}.env_type: {env.env_type!r} isn't a built-in environment "
                f"({', '.join(known)}) nor a "
                f"module:Class; train needs a program that registers it.{nearest(env.env_type, known)}"
            )


def _sft_rows(config: SFTConfig) -> Iterator[SettingRow]:
    shape, arguments = config.model_shape(), config.model_args
    yield "model", _model(arguments.model_name_or_path, shape)
    yield "training", f"{arguments.dtype}, attention {arguments.attn_implementation}"
    yield "optimiser", _optimizer(config.training_args, config.max_grad_norm)
    limit = f", at most {counted(config.max_steps, 'optimiser step')}" if config.max_steps else ""
    yield (
        "steps",
        f"{counted(config.num_epochs, 'epoch')}{limit}, each of {config.samples_per_optimizer_step} samples",
    )
    tokens = config.max_tokens_per_microbatch_in_train
    train = _filled(config.use_dynamic_batching_in_train, tokens, config.training_args)
    yield (
        "micro-batches",
        f"up to {train}; forward passes up to {tokens} tokens; at most {config.sequence_length} a sample",
    )
    if shape:
        yield "memory", trained_memory(arguments, shape)
    every = f"every {counted(config.eval_steps, 'step')} and " if config.eval_steps else ""
    yield "validation", f"{every}at the end" if config.val_files else "never (no val_files)"
    yield "profile", profile(config)
    yield "tracking", _tracking(config)


def _agentic_rows(config: AgenticConfig, placement: Placement) -> Iterator[SettingRow]:
    shape = config.model_shape()
    yield "model", _model(config.actor_train.model_args.model_name_or_path, shape)
    for name, role in config.active_roles.items():
        in_policy = name == "reference" and config.is_reference_in_policy
        yield name, IN_POLICY if in_policy else _role(role, _where(name, role, placement))
    yield "optimiser", _optimizer(config.actor_train.training_args, config.max_grad_norm)
    if config.needs_critic:
        alone = (
            f"; alone for the first {counted(config.critic_warmup, 'step')}" if config.critic_warmup else ""
        )
        steps = _optimizer_steps(config, "critic")
        yield (
            "critic's",
            f"{_optimizer(config.critic.training_args, config.max_grad_norm)}; {steps} a step{alone}",
        )
    yield from environments(config, "train")
    yield from _data(config)
    yield from _algorithm(config)
    yield from _step(config)
    yield "sampling", f"{sampling(config, 'train')}, {counted(episodes_at_once(config), 'episode')} at once"
    if config.plays_ahead:
        ratio = config.async_generation_ratio
        yield (
            "asynchronous",
            f"up to {'1 batch' if ratio == 1 else f'{ratio} batches'} ahead; {_asynchronous(config)}",
        )
    if shape:
        yield "memory", memory(config, shape, placement)
        yield "checkpoints", checkpoints(config, shape)
    yield "validation", validation(config)
    yield "profile", profile(config)
    yield "tracking", _tracking(config)


IN_POLICY = "the policy's own weights with the adapter off"


def profile(config: AgenticConfig | SFTConfig) -> str:
    """A text: whether two runs of the config are bit-identical, and the seed."""
    if not config.deterministic:
        return f"bit-identity isn't promised (deterministic: true asks for it), seed {config.seed}"
    replayed = ", bit-identical when it is replayed (train --replay)" if config.plays_ahead else ""
    return f"deterministic{replayed}, seed {config.seed}"


def _tracking(config: AgenticConfig | SFTConfig) -> str:
    return ", ".join(["metrics.jsonl", *config.track_with])


def environments(config: AgenticConfig, split: Split) -> Iterator[SettingRow]:
    """One row for each environment that a split plays."""
    for tag in config.env_manager(split).env_tags:
        env = config.custom_envs[tag]
        limits = f"at most {counted(env.max_steps, 'action')} of {config.max_new_tokens(split, tag)} tokens"
        yield f"env {tag}", f"{env.env_type} by {env.agent_name}, mode {env.mode}, {limits}"


def _data(config: AgenticConfig) -> Iterator[SettingRow]:
    """The data rows that are played, and the rewards of every episode."""
    if config.train_env_manager.has_rows:
        order = "in a new order each epoch" if config.data.shuffle else "in their order"
        order = "drawn by their success (curriculum)" if config.data.curriculum else order
        often = f", {counted(config.data.num_epochs, 'epoch')}" if config.data.num_epochs else ""
        agent = f"{config.data.default_agent} unless a row's {config.data.agent_name_key} names another"
        yield "data", f"rows of {', '.join(config.data.train_files or ())}, {order}{often}, by {agent}"
    if config.data.reward:
        rewards = " + ".join(f"{reward.weight:g} × {reward.name}" for reward in config.data.reward)
        checkers = ", ".join(sorted(config.data.checkers))
        yield "rewards", f"{rewards}; answers compared by {checkers}" if checkers else rewards


def start_of(path: str) -> str:
    """A model's folder or hub name; for an adapter also its base model."""
    base = base_of_adapter(path)
    return path if base is None else f"{path}, an adapter merged into {base}"


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
    return f"{start_of(path)}: {shape.architecture}, {shown} parameters, context {shape.context_length}"


def _where(name: str, role: Role, placement: Placement) -> str:
    """The devices of a role that names some, else its process."""
    if not role.device_mapping or f"{name}.device_mapping" in placement.unused_keys:
        is_apart = placement.trains_apart and name in placement.roles
        return "in the trainer's process" if is_apart else "in this process"
    placed = placement.of(name)
    numbers = _numbers(placed.devices)
    if len(placed.devices) == 1:
        return f"device {numbers}"
    if name in placement.roles:
        return f"a process for each of devices {numbers}"
    if placed.size == len(placed.devices):
        return f"a server for each of devices {numbers}"
    groups = (", ".join(map(str, devices)) for devices in placed.ranks)
    return f"a server on devices {' and one on '.join(groups)}"


def _numbers(devices: Sequence[int]) -> str:
    """A text: `0–7` for a run of three or more."""
    is_run = [*devices] == [*range(devices[0], devices[-1] + 1)] and len(devices) > 2
    return f"{devices[0]}–{devices[-1]}" if is_run else ", ".join(map(str, devices))


def _role(role: Role, where: str) -> str:
    kind = STRATEGIES[role.strategy_args.strategy_name].kind
    arguments = role.model_args
    parts = [
        role.strategy_args.strategy_name,
        where,
        arguments.dtype,
        f"attention {arguments.attn_implementation}",
    ]
    if kind == "train" and arguments.lora_rank is not None:
        parts.append(f"LoRA rank {arguments.lora_rank}")
    if kind == "train" and arguments.freeze_module_prefix:
        parts.append(f"frozen: {', '.join(arguments.freeze_module_prefix)}")
    return ", ".join(parts)


def _algorithm(config: AgenticConfig) -> Iterator[SettingRow]:
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


def _step(config: AgenticConfig) -> Iterator[SettingRow]:
    manager, role = config.train_env_manager, config.actor_train
    batch, most = config.rollout_batch_size, config.max_samples_per_trajectory
    num_groups, length = batch // manager.group_size, config.sequence_length
    samples = (
        f"trajectories of at most {most} samples (mode step: one per turn)" if most > 1 else "trajectories"
    )
    tags = f"{_tags(manager)}{_few(manager, num_groups, 'in a step')}"
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
    yield "optimiser steps", f"{_optimizer_steps(config, 'actor_train')}{epochs}; {in_all}"
    train = _filled(
        role.use_dynamic_batching_in_train, role.max_tokens_per_microbatch_in_train, role.training_args
    )
    infer = _filled(
        role.use_dynamic_batching_in_infer, role.max_tokens_per_microbatch_in_infer, role.training_args
    )
    yield "micro-batches", f"up to {train}; forward passes up to {infer}"
    sampled = f"at most {batch * most * length:,} a step, of which sampled {batch * most_sampled(config):,}"
    responses = sorted({config.max_new_tokens("train", tag) for tag in manager.tags})
    yield (
        "tokens",
        f"{sampled}; contexts of {length}, responses of {' or '.join(map(str, responses)) or 'any length'}",
    )


def _filled(by_tokens: bool, tokens: int, arguments: TrainingArgs) -> str:
    """A text: the maximum size of a micro-batch, in tokens or samples."""
    return f"{tokens} tokens" if by_tokens else f"{arguments.per_device_train_batch_size} samples"


def _optimizer_steps(config: AgenticConfig, role: str) -> str:
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


def sampling(config: AgenticConfig, split: Split) -> str:
    """How tokens are drawn when a split is played."""
    arguments = config.sampling(split)
    if arguments.is_greedy:
        return "greedy"
    text = f"temperature {arguments.temperature:g}"
    if arguments.is_truncated:
        text += f", cut to top_p {arguments.top_p:g}, top_k {arguments.top_k}, min_p {arguments.min_p:g}"
        text += f", repetition_penalty {arguments.repetition_penalty:g}"
    return text


def _optimizer(arguments: TrainingArgs, max_grad_norm: float) -> str:
    is_share = arguments.warmup_ratio and not arguments.warmup_steps
    warmup = f"{arguments.warmup_ratio:.0%} of all" if is_share else str(arguments.warmup_steps)
    return (
        f"AdamW at {arguments.learning_rate:g}, {arguments.lr_scheduler_type}, warm-up {warmup} steps, "
        f"weight decay {arguments.weight_decay:g}, gradients clipped to norm {max_grad_norm:g}"
    )


def _asynchronous(config: AgenticConfig) -> str:
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


def validation(config: AgenticConfig, num_trajectories: int | None = None) -> str:
    """How a run validates. `num_trajectories`, a validation's size, is known once tasks are built; None =
    val_batch_size."""
    if not config.uses_validation:
        return "never (eval_steps 0)"
    manager = config.val_env_manager
    few = _few(manager, config.val_batch_size // manager.group_size, "in validation, always the same ones")
    most = f"{'at most ' * manager.has_rows}{config.val_batch_size}"
    trajectories = f"{num_trajectories or most} trajectories from {_tags(manager)}{few}"
    parts = [f"every {counted(config.eval_steps, 'step')}, {sampling(config, 'val')}, {trajectories}"]
    if config.save_best:
        parts.append(
            f"the model with the best {config.save_best.metric} ({config.save_best.mode}) goes to best"
        )
    if config.early_stopping:
        parts.append(
            f"{counted(config.early_stopping.patience, 'validation')} without a better one end the run"
        )
    return "; ".join(parts)


def _shares(manager: EnvManager) -> dict[str, int]:
    """Tag → its number of groups in `num_groups_partition`, for tags with at least one."""
    return {
        tag: share for tag, share in zip(manager.tags, manager.num_groups_partition, strict=True) if share
    }


def _tags(manager: EnvManager) -> str:
    """The tags that are played, with the ratio of their groups if there are several."""
    shares = _shares(manager)
    if len(shares) < 2:
        return ", ".join(shares)
    common = gcd(*shares.values())
    return f"{', '.join(shares)} (groups {' : '.join(str(share // common) for share in shares.values())})"


def _few(manager: EnvManager, num_groups: int, where: str) -> str:
    """A note if there are fewer groups than tags, empty otherwise."""
    num_tags = len(_shares(manager))
    return (
        f"; {num_groups} groups hold at most {num_groups} of the {num_tags} tags {where}"
        if num_groups < num_tags
        else ""
    )
