"""Builds the strategy that trains or runs the model of a role."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnwise.build.lora import prepare_training
from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.roles import TrainingArgs
from turnwise.errors import ConfigError
from turnwise.models.fused import load_fused
from turnwise.models.load import load_model, parse_dtype
from turnwise.models.lora import Adapters
from turnwise.models.value_head import load_value_model, value_head
from turnwise.pipelines.roles import BatchPlan
from turnwise.runtime.rank import RankContext
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.torch_strategy import TorchStrategy


def batch_plan(config: AgenticConfig, role_name: str) -> BatchPlan:
    """How a role's samples are cut into optimiser steps and micro-batches."""
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


def train_strategy(
    config: AgenticConfig,
    name: str,
    model: PreTrainedModel,
    rank: RankContext,
    adapters: Adapters | None = None,
) -> TorchStrategy:
    role = config.roles[name]
    total_steps = config.num_training_steps(name) * config.optimizer_steps_per_batch(name)
    return TorchStrategy(
        model,
        adapters=adapters,
        optimizer=optimizer_settings(role.training_args, total_steps),
        temperature=config.sampling("train").temperature,
        max_grad_norm=config.max_grad_norm,
        dtype=parse_dtype(role.model_args.dtype),
        is_gradient_checkpointing=not role.model_args.disable_gradient_checkpointing,
        rank=rank,
    )


def policy_strategy(
    config: AgenticConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    rank: RankContext,
) -> TorchStrategy:
    """The strategy that trains the policy. `folder` is the run's.

    Raises:
        ConfigError: a name of `model_args` isn't in the model.
    """
    arguments = config.actor_train.model_args
    path, attention = arguments.model_name_or_path, arguments.attn_implementation
    model = load_fused(path, device=rank.device, attn_implementation=attention, trust=arguments.trust)
    adapters = prepare_training(arguments, model, tokenizer, folder, config.seed)
    return train_strategy(config, "actor_train", model, rank, adapters)


def critic_strategy(
    config: AgenticConfig, tokenizer: PreTrainedTokenizerBase, folder: Path, rank: RankContext
) -> TorchStrategy:
    """
    Raises:
        ConfigError: a name of `model_args` isn't in the model, or the value head is new and frozen.
    """
    arguments = config.critic.model_args
    path, attention = arguments.model_name_or_path, arguments.attn_implementation
    model = load_value_model(path, device=rank.device, attn_implementation=attention, trust=arguments.trust)
    adapters = prepare_training(arguments, model, tokenizer, folder, config.seed)
    head = value_head(model)
    if head is not None and not head.weight.requires_grad and not head.weight.any():
        raise ConfigError(
            f"critic.model_args.freeze_module_prefix: {', '.join(arguments.freeze_module_prefix or ())} freeze the value head, "
            f"which is 0 everywhere: all values would stay the same; leave it out, or name a value model as reward_pretrain"
        )
    return train_strategy(config, "critic", model, rank, adapters)


def frozen_strategy(config: AgenticConfig, rank: RankContext) -> TorchStrategy:
    arguments = config.reference.model_args
    path, attention = arguments.model_name_or_path, arguments.attn_implementation
    model = load_model(path, device=rank.device, attn_implementation=attention, trust=arguments.trust)
    temperature = config.sampling("train").temperature
    dtype = parse_dtype(arguments.dtype)
    return TorchStrategy(model, temperature=temperature, dtype=dtype, rank=rank)


def sft_strategy(
    config: SFTConfig, total_steps: int, tokenizer: PreTrainedTokenizerBase, folder: Path, rank: RankContext
) -> TorchStrategy:
    """The strategy of supervised fine-tuning.

    Raises:
        ConfigError: a name of `model_args` isn't in the model.
    """
    arguments = config.model_args
    path, attention = arguments.model_name_or_path, arguments.attn_implementation
    model = load_model(path, device=rank.device, attn_implementation=attention, trust=arguments.trust)
    return TorchStrategy(
        model,
        adapters=prepare_training(arguments, model, tokenizer, folder, config.seed),
        optimizer=optimizer_settings(config.training_args, total_steps),
        max_grad_norm=config.max_grad_norm,
        dtype=parse_dtype(arguments.dtype),
        is_gradient_checkpointing=not arguments.disable_gradient_checkpointing,
        rank=rank,
    )


def optimizer_settings(arguments: TrainingArgs, total_steps: int) -> OptimizerSettings:
    """A role's `training_args`, for the optimiser."""
    return OptimizerSettings(
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        scheduler=arguments.lr_scheduler_type,
        warmup_steps=arguments.warmup_steps,
        warmup_ratio=arguments.warmup_ratio,
        total_steps=total_steps,
    )
