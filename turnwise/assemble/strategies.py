"""Builds the strategies that train or run the models of roles."""

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.schema.model_args import ModelArgs, StrategyArgs
from turnwise.errors import ConfigError
from turnwise.models.load import parse_dtype
from turnwise.models.lora import ALL_LINEAR, LoRASettings
from turnwise.pipelines.model_role import BatchPlan
from turnwise.protocols import TrainStrategy
from turnwise.runtime.entry_points import load_class
from turnwise.runtime.rank import RankContext
from turnwise.spec import STRATEGIES
from turnwise.training.base import BaseStrategy
from turnwise.training.model_source import ModelSource, NewAdapters
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.settings import StrategySettings


def batch_plan(config: AgenticConfig, role_name: str) -> BatchPlan:
    """How the samples of a role are split into optimiser steps and micro-batches."""
    role = config.roles[role_name]
    max_tokens_train = None
    if role.use_dynamic_batching_in_train:
        max_tokens_train = role.max_tokens_per_microbatch_in_train
    max_tokens_infer = None
    if role.use_dynamic_batching_in_infer:
        max_tokens_infer = role.max_tokens_per_microbatch_in_infer
    return BatchPlan(
        samples_per_step=role.samples_per_optimizer_step,
        max_length=config.sequence_length,
        seed=config.seed,
        num_epochs=config.ppo_epochs,
        max_sequences=role.training_args.per_device_train_batch_size,
        max_tokens_train=max_tokens_train,
        max_tokens_infer=max_tokens_infer,
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
) -> TrainStrategy:
    """The strategy that trains `actor_train`, `critic` or `sft` in `total_steps` optimiser steps. `folder` is
    the run's."""
    role = config if isinstance(config, SFTConfig) else config.roles[name]
    training = role.training_args
    settings = StrategySettings(
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
        dtype=parse_dtype(role.model_args.dtype),
        is_gradient_checkpointing=not role.model_args.disable_gradient_checkpointing,
    )
    source = _trained_model(config, name, role.model_args, tokenizer, folder)
    strategy = role.strategy_args
    return _strategy_class(strategy).for_role(source, rank, strategy.strategy_config, settings)


def reference_strategy(config: AgenticConfig, rank: RankContext) -> TrainStrategy:
    """The strategy that runs the frozen `reference`."""
    role = config.reference
    settings = StrategySettings(
        temperature=config.sampling("train").temperature,
        dtype=parse_dtype(role.model_args.dtype),
    )
    source = model_source(role.model_args)
    strategy = role.strategy_args
    return _strategy_class(strategy).for_role(source, rank, strategy.strategy_config, settings)


def model_source(arguments: ModelArgs) -> ModelSource:
    """The model that a role starts from, to be loaded as it is."""
    return ModelSource(arguments.model_name_or_path, arguments.attn_implementation, arguments.trust)


def _strategy_class(strategy: StrategyArgs) -> type[BaseStrategy]:
    entry = STRATEGIES[strategy.strategy_name].entry
    strategy_class: type[BaseStrategy] = load_class(entry, "strategy_args.strategy_name", ConfigError)
    return strategy_class


def _trained_model(
    config: AgenticConfig | SFTConfig,
    role_name: str,
    arguments: ModelArgs,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> ModelSource:
    """The model that a role starts from, and what of it is trained. With `lora_rank` that is adapters."""
    is_critic = role_name == "critic"
    frozen = tuple(arguments.freeze_module_prefix or ())
    adapters = None
    if arguments.lora_rank is not None and arguments.lora_alpha is not None:
        settings = LoRASettings(
            rank=arguments.lora_rank,
            alpha=arguments.lora_alpha,
            dropout=arguments.lora_dropout,
            targets=tuple(arguments.lora_target or (ALL_LINEAR,)),
            frozen=frozen,
            seed=config.seed,
        )
        merged = folder / ("base_critic" if is_critic else "base_model")
        adapters = NewAdapters(settings, merged.resolve(), tokenizer)
    return replace(
        model_source(arguments),
        has_value_head=is_critic,
        is_fused=role_name == "actor_train",
        frozen=frozen,
        adapters=adapters,
    )
