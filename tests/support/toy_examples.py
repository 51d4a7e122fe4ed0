"""Overrides with which examples for several GPUs, or for one, run in seconds on CPUs: few episodes of a small
model in fp32, on as many devices as a test says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turnwise.config import AgenticConfig
from turnwise.models.make import make_model
from turnwise.play.tokenizer_text import environment_text

GROUP_SIZE = 2
MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def toy_policy(folder: Path) -> Path:
    """A model with random weights that can be divided in two."""
    return make_model("tiny", folder, environment_text(), overrides=MODEL).folder


def toy_sizes(config: AgenticConfig, model: Path, output_dir: Path, num_devices: int) -> list[str]:
    """Two steps of a group a device, each with one update. The loss has the entropy in it, since equal
    rewards would leave no gradient."""
    num_groups = num_devices
    num_tags = len(config.train_env_manager.tags)
    partition = ",".join([str(num_groups // num_tags)] * num_tags)
    of_run = {
        "pretrain": model,
        "output_dir": output_dir,
        "max_steps": 2,
        "eval_steps": 0,
        "save_steps": 0,
        "sequence_length": 1024,
        "entropy_loss_coef": 0.01,
        "actor_train.training_args.learning_rate": 1e-3,
        "actor_train.training_args.warmup_steps": 0,
        "rollout_batch_size": num_groups * GROUP_SIZE,
        "train_env_manager.num_env_groups": num_groups,
        "train_env_manager.group_size": GROUP_SIZE,
        "train_env_manager.num_groups_partition": f"[{partition}]",
        "actor_train.training_args.per_device_train_batch_size": GROUP_SIZE,
        "actor_train.training_args.gradient_accumulation_steps": 1,
    }
    for tag in config.train_env_manager.tags:
        of_run[f"custom_envs.{tag}.max_steps"] = 2
        of_run[f"custom_envs.{tag}.max_tokens_per_step"] = 8
    return [f"{key}={value}" for key, value in of_run.items()]


def on_cpus(
    num_devices: int, roles: Sequence[str] = ("actor_train", "actor_infer", "reference")
) -> list[str]:
    """fp32, sdpa and embedded servers, with every role on all of the devices."""
    changes = [f"num_gpus_per_node={num_devices}"]
    devices = ",".join(str(device) for device in range(num_devices))
    for role in roles:
        changes += [f"{role}.device_mapping=[{devices}]", f"{role}.model_args.dtype=fp32"]
        if role != "actor_infer":
            changes.append(f"{role}.model_args.attn_implementation=sdpa")
    return [*changes, *embedded()]


def embedded() -> list[str]:
    return [
        "actor_infer.strategy_args.strategy_name=embedded",
        "actor_infer.strategy_args.strategy_config=null",
    ]
