"""How large a run is beside its memory: what makes its steps smaller, and what its checkpoints take on the disk."""

from __future__ import annotations

from turnwise.config.model_shape import ModelShape, read_model_shape
from turnwise.config.roles import ModelArgs
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig

_PAGE = "docs/how_long.md has measured times"
_SHORTEST_RESPONSE = 8
"""Tokens. Shorter ones hold no answer."""


def smaller_steps(config: AgenticConfig | SFTConfig) -> str:
    """Settings that about halve the time of a step, each with a value that this config can have."""
    changes = list(_smaller_sft(config) if isinstance(config, SFTConfig) else _smaller(config))
    tried = f"smaller sizes to try: {' '.join(changes)}, or" if changes else "try"
    return f"{tried} a smaller model ({_PAGE})"


def _smaller_sft(config: SFTConfig) -> list[str]:
    training = config.training_args
    if training.gradient_accumulation_steps > 1:
        return [f"training_args.gradient_accumulation_steps={training.gradient_accumulation_steps // 2}"]
    if training.per_device_train_batch_size > 1:
        return [f"training_args.per_device_train_batch_size={training.per_device_train_batch_size // 2}"]
    return []


def _smaller(config: AgenticConfig) -> list[str]:
    manager, changes = config.train_env_manager, []
    num_groups = config.rollout_batch_size // manager.group_size
    if num_groups > 1:
        changes.append(f"rollout_batch_size={num_groups // 2 * manager.group_size}")
    elif manager.group_size >= 4:
        half = manager.group_size // 2
        changes += [f"rollout_batch_size={half}", f"train_env_manager.group_size={half}"]
    for tag in manager.env_tags:
        env, response = config.custom_envs[tag], config.max_new_tokens("train", tag)
        if env.max_steps > 1:
            changes.append(f"custom_envs.{tag}.max_steps={env.max_steps // 2}")
        if response // 2 >= _SHORTEST_RESPONSE:
            changes.append(f"custom_envs.{tag}.max_tokens_per_step={response // 2}")
    return changes


def _checkpoint_bytes(arguments: ModelArgs, shape: ModelShape) -> int:
    """Bytes of one model: fp32 weights, and Adam's two moments of what is trained. An adapter's base model isn't saved."""
    if arguments.lora_rank is None:
        return 12 * shape.num_parameters
    return 12 * shape.num_lora_parameters(arguments.lora_rank, arguments.lora_target or ["all"])


def checkpoints(config: AgenticConfig, shape: ModelShape) -> str:
    """Size of one checkpoint on the disk, and of all that are kept."""
    size = _checkpoint_bytes(config.actor_train.model_args, shape)
    if config.needs_critic:
        critic = read_model_shape(config.critic.model_args.model_name_or_path) or shape
        size += _checkpoint_bytes(config.critic.model_args, critic)
    kept = config.max_ckpt_to_keep
    # A new one is written before the oldest goes.
    held = f", {bytes_text((kept + 1) * size)} while one is written" if kept else ", all kept"
    return f"about {bytes_text(size)} each{held} (max_ckpt_to_keep, save_steps)"


def bytes_text(number: int) -> str:
    """
    >>> bytes_text(1_500_000), bytes_text(8_000_000_000)
    ('1.5 MB', '8.0 GB')
    """
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
