"""Builds the strategies that train or run the models of roles."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.roles import ModelArgs
from turnwise.entry_points import load_class
from turnwise.errors import ConfigError
from turnwise.hub import local_path
from turnwise.model_folder import base_of_adapter
from turnwise.models.fused import load_fused
from turnwise.models.load import load_model, parse_dtype, save_model
from turnwise.models.lora import ALL_LINEAR, Adapters, LoRASettings, freeze
from turnwise.models.value_head import load_value_model, value_head
from turnwise.pipelines.roles import BatchPlan
from turnwise.runtime.rank import RankContext
from turnwise.spec import STRATEGIES
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.torch_strategy import TorchStrategy

logger = logging.getLogger(__name__)
_LOADERS: dict[str, Callable[..., PreTrainedModel]] = {"actor_train": load_fused, "critic": load_value_model, "sft": load_model}


def batch_plan(config: AgenticConfig, role_name: str) -> BatchPlan:
    """How the samples of a role are split into optimiser steps and micro-batches."""
    role = config.roles[role_name]
    return BatchPlan(
        samples_per_step=role.samples_per_optimizer_step,
        max_length=config.sequence_length,
        seed=config.seed,
        num_epochs=config.ppo_epochs,
        max_sequences=role.training_args.per_device_train_batch_size,
        max_tokens_train=role.max_tokens_per_microbatch_in_train if role.use_dynamic_batching_in_train else None,
        max_tokens_infer=role.max_tokens_per_microbatch_in_infer if role.use_dynamic_batching_in_infer else None,
        samples_per_batch=config.rollout_batch_size,
        first_step=config.max_steps - config.num_training_steps(role_name),
    )


def trained_strategy(
    config: AgenticConfig | SFTConfig,
    name: str,
    total_steps: int,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    rank: RankContext,
) -> TorchStrategy:
    """The strategy that trains `actor_train`, `critic` or `sft` in `total_steps` optimiser steps. `folder` is the run's."""
    role = config if isinstance(config, SFTConfig) else config.roles[name]
    arguments, training = role.model_args, role.training_args
    model = load_role(_LOADERS[name], arguments, rank)
    adapters = _prepare(arguments, model, tokenizer, folder, config.seed, rank)
    head = value_head(model)
    if head is not None and not head.weight.requires_grad and not head.weight.any():
        raise ConfigError(
            f"critic.model_args.freeze_module_prefix: {', '.join(arguments.freeze_module_prefix or ())} freeze the value head, "
            "which is 0 everywhere: all values would stay the same; leave it out, or name a value model as reward_pretrain"
        )
    strategy = role.strategy_args
    kind: Any = load_class(STRATEGIES[strategy.strategy_name].entry, "strategy_args.strategy_name", ConfigError)
    made: TorchStrategy = kind(
        model,
        adapters=adapters,
        optimizer=OptimizerSettings(
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            betas=(training.adam_beta1, training.adam_beta2),
            scheduler=training.lr_scheduler_type,
            warmup_steps=training.warmup_steps,
            warmup_ratio=training.warmup_ratio,
            total_steps=total_steps,
        ),
        temperature=1.0 if isinstance(config, SFTConfig) else config.sampling("train").temperature,
        max_grad_norm=config.max_grad_norm,
        dtype=parse_dtype(arguments.dtype),
        is_gradient_checkpointing=not arguments.disable_gradient_checkpointing,
        rank=rank,
        **({"options": strategy.strategy_config} if strategy.is_sharded else {}),
    )
    return made


def reference_strategy(config: AgenticConfig, rank: RankContext) -> TorchStrategy:
    arguments = config.reference.model_args
    model, temperature = load_role(load_model, arguments, rank), config.sampling("train").temperature
    return TorchStrategy(model, temperature=temperature, dtype=parse_dtype(arguments.dtype), rank=rank)


def load_role(load: Callable[..., PreTrainedModel], arguments: ModelArgs, rank: RankContext) -> PreTrainedModel:
    """Loads a role's model onto the device of `rank`."""
    path, attention = arguments.model_name_or_path, arguments.attn_implementation
    return load(path, device=rank.device, attn_implementation=attention, trust=arguments.trust)


def _prepare(
    arguments: ModelArgs,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    seed: int,
    rank: RankContext,
) -> Adapters | None:
    """With `lora_rank`, puts adapters into the model and returns them. Always excludes `freeze_module_prefix` from training."""
    frozen, head = tuple(arguments.freeze_module_prefix or ()), value_head(model)
    if arguments.lora_rank is None or arguments.lora_alpha is None:
        freeze(model, frozen)
        return None
    settings = LoRASettings(
        rank=arguments.lora_rank,
        alpha=arguments.lora_alpha,
        dropout=arguments.lora_dropout,
        targets=tuple(arguments.lora_target or (ALL_LINEAR,)),
        frozen=frozen,
        seed=seed,
    )
    merged = folder / ("base_model" if head is None else "base_critic")
    base = plain_base(arguments.model_name_or_path, model, tokenizer, merged.resolve(), rank)
    return Adapters(model, settings, base, head)


def plain_base(path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, merged: Path, rank: RankContext) -> str:
    """The plain model onto which peft puts new adapters: `path`, or the folder `merged` if `path` is an adapter.

    The first rank writes the `model` with that adapter merged to `merged`. The others only need the name: they have the model,
    and the first rank alone writes checkpoints. So no rank waits, and none writes into another's half-written folder."""
    if base_of_adapter(path) is None:
        return str(local_path(path).resolve()) if local_path(path).is_dir() else path
    if rank.answers:
        if not merged.is_dir():
            save_model(model, tokenizer, merged)
        logger.info("%s is an adapter: new adapters are put onto the merged model, which is in %s", path, merged)
    return str(merged)
