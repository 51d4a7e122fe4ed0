"""What is impossible or contradicts itself is refused with its reason; what has no effect is said."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from messages import mentions, says
from small_configs import LAKE, SFT, config_of, notes_of, values_of

from turnwise.config import SFTConfig, ineffective, parse_config, unavailable, unavailable_to_play
from turnwise.errors import ConfigError

SERVER = "actor_infer.strategy_args"
CACHE = f"{SERVER}.strategy_config.kv_cache_bytes"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"async_generation_ratio": 0.5}, says("async_generation_ratio", "0.5", "0")),
    (
        {"reward_normalization.method": "identity"},
        says("reward_normalization.method", "identity", "adv_estimator", "grpo", "mean_std", "reinforce"),
    ),
    ({"adv_estimator": "rloo", "reward_normalization.method": "mean"}, says("reward_normalization", "rloo")),
    (
        {"adv_estimator": "gae", "reward_normalization.method": "mean_std"},
        says("reward_normalization", "reward_placement", "gae"),
    ),
    ({"add_token_level_kl": True}, "init_kl_coef is 0"),
    ({"use_kl_loss": True, "kl_loss_type": "k1"}, says("kl_loss_type", "k1", "k3")),
    ({"use_kl_loss": True, "kl_loss_type": "abs"}, says("kl_loss_type", "abs", "k3")),
    (
        {"actor_train.learning_rate": 1e-5},
        says("actor_train.learning_rate", "actor_train.training_args"),
    ),
    ({"rollout_batch_size": 2}, "use 8"),
    ({"rollout_batch_size": 65}, r"65 = 8 × 8 \+ 1\); use 64 or 72"),
    ({"eval_steps": 1, "val_env_manager.group_size": 3}, r"128 = 42 × 3 \+ 2\); use 126 or 129"),
    ({"train_env_manager.num_groups_partition": [7]}, "7 = 7, but num_env_groups is 8"),
    ({"train_env_manager.num_groups_partition": [4, 4]}, "2 numbers for 1 tags"),
    ({"train_env_manager.tags": ["Lak"]}, says("train_env_manager.tags", "'Lak'", "custom_envs", "'Lake'")),
    ({"train_env_manager.group_size": 1}, says("train_env_manager.group_size", "1", "grpo", "0")),
    (
        {"adv_estimator": "grpo_passk", "train_env_manager.group_size": 1},
        says("train_env_manager.group_size", "grpo_passk", "0"),
    ),
    (
        {"adv_estimator": "gigpo", "train_env_manager.group_size": 1},
        says("train_env_manager.group_size", "1", "gigpo"),
    ),
    (
        {"adv_estimator": "gigpo", "reward_normalization.method": "identity"},
        says("reward_normalization.method", "identity", "adv_estimator", "gigpo"),
    ),
    (
        {"adv_estimator": "gigpo", "episode_reward_weight": 0, "step_reward_weight": 0},
        says("episode_reward_weight", "step_reward_weight", "set one"),
    ),
    (
        {"adv_estimator": "remax", "whiten_rewards": True},
        says("whiten_rewards", "remax", "whiten_advantages"),
    ),
    (
        {"adv_estimator": "remax", "reward_normalization.grouping": "batch"},
        says("reward_normalization", "remax"),
    ),
    (
        {"adv_estimator": "remax", "group_filter": "non_zero_variance"},
        says("group_filter", "non_zero_variance", "adv_estimator", "remax"),
    ),
    (
        {"adv_estimator": "gae", "max_steps": 20, "critic_warmup": 20},
        says("critic_warmup", "20", "max_steps", "19"),
    ),
    ({"prompt_length": 100}, "set response_length too"),
    (
        {"actor_train.training_args.learning_rate": 0},
        says("actor_train.training_args.learning_rate", "greater than 0"),
    ),
    (
        {
            "actor_train.training_args.lr_scheduler_type": "polynomial",
            "actor_train.training_args.learning_rate": 1e-7,
        },
        says("actor_train.training_args.learning_rate", "1e-07", "lr_scheduler_type", "polynomial"),
    ),
    (
        {"actor_train.training_args.adam_beta2": 1},
        says("actor_train.training_args.adam_beta2", "less than 1"),
    ),
    (
        {"pg_args.clip_hgh": 0.3},
        says("pg_args.clip_hgh", "pg_variant", "ppo", "'clip_high'"),
    ),
    ({"pg_args.clip_low": -0.1}, says("pg_args.clip_low", "-0.1")),
    ({"pg_args.clip_low": "0.1"}, says("pg_args.clip_low", "'0.1'", "a number")),
    ({"pg_args.dual_clip": 1.0}, says("pg_args.dual_clip", "1.0", "dual_clip_loss: false")),
    ({"pg_variant": "kimi15", "pg_args.tau": None}, "pg_args.tau: got None"),
    ({"pg_variant": "sapo", "pg_args.tau_positive": 0}, "0 isn't a temperature"),
    ({"pg_variant": "kl_cov", "pg_args.fraction": 2.0}, says("pg_args.fraction", "2.0", "1")),
    ({"pg_variant": "tis", "pg_args.cap": 0}, says("pg_args.cap", "0")),
    ({"pg_variant": "clip_cov", "pg_args.covariance_low": 6}, "6 isn't below covariance_high 5.0"),
    (
        {"adv_estimator": "gae", "group_filter": "non_zero_variance", "train_env_manager.group_size": 1},
        says("group_filter", "group_size", "1", "non_zero_variance"),
    ),
    (
        {"pg_variant": "vanilla", "ratio_type": "segment"},
        says("ratio_type", "segment", "pg_variant", "vanilla"),
    ),
    (
        {"pg_variant": "gspo", "ratio_type": "token"},
        says("ratio_type", "token", "gspo", "segment"),
    ),
    (
        {"use_rollout_log_probs": True, "train_infer_correction.is_weight": {}},
        says("train_infer_correction", "use_rollout_log_probs", "ratio"),
    ),
    ({"group_filter": "odd"}, says("group_filter", "'odd'", "non_zero_variance")),
    (
        {"actor_train.strategy_args.strategy_name": "vllm"},
        says("actor_train.strategy_args.strategy_name", "vllm", "torch_train"),
    ),
    (
        {SERVER: {"strategy_name": "hf", "strategy_config": {"max_length": 3}}},
        says("actor_infer.strategy_args.strategy_config.max_length", "hf", "has: none"),
    ),
    (
        {SERVER: {"strategy_config": {"max_concurrency": 0}}},
        says("actor_infer.strategy_args.strategy_config", "max_concurrency", "0"),
    ),
    (
        {SERVER: {"strategy_name": "sglang", "strategy_config": {"url": "nowhere"}}},
        says("actor_infer.strategy_args.strategy_config.url", "'nowhere'", "http://localhost"),
    ),
    (
        {SERVER: {"strategy_name": "sglang", "strategy_config": {"port": 99999}}},
        says("actor_infer.strategy_args.strategy_config.port", "99999", "65,535"),
    ),
    (
        {SERVER: {"strategy_name": "sglang", "strategy_config": {"url": "http://a", "tp_size": 2}}},
        says("actor_infer.strategy_args.strategy_config.url", "remove tp_size"),
    ),
    (
        {"actor_infer.strategy_args.strategy_name": "torch_train"},
        says("actor_infer.strategy_args.strategy_name", "embedded", "vllm", "sglang"),
    ),
    (
        {"actor_train.strategy_args.strategy_name": "torch_trian"},
        says("actor_train.strategy_args.strategy_name", "'torch_train'", "torch_trian"),
    ),
    (
        {"adv_estimator": "gae", "critic.model_args.model_type": "causal_lm"},
        says("critic.model_args.model_type", "causal_lm", "token_classification"),
    ),
    (
        {
            "actor_train.device_mapping": [0, 1, 2],
            "actor_train.strategy_args.strategy_name": "megatron_train",
            "actor_train.strategy_args.strategy_config.tp_size": 2,
        },
        says("actor_train.device_mapping", "3", "2"),
    ),
    (
        {"actor_infer.generating_args.num_return_sequences": 4},
        says("actor_infer.generating_args.num_return_sequences", "4", "group_size"),
    ),
    (
        {"actor_infer.generating_args.temperature": 0.0},
        says("actor_infer.generating_args", "temperature 0", "greedy"),
    ),
    (
        {"actor_infer.generating_args.top_p": 0.9, "train_infer_correction.is_weight": {}},
        says("train_infer_correction", "top_k", "repetition_penalty", "top_p 1"),
    ),
    (
        {"actor_infer.generating_args.top_k": 257, "use_rollout_log_probs": True},
        says("use_rollout_log_probs", "top_k", "257", "1", "256"),
    ),
    (
        {"actor_infer.generating_args.min_p": 0.1, "use_rollout_log_probs": True},
        says("use_rollout_log_probs", "top_k", "0", "repetition_penalty", "1"),
    ),
    (
        {
            "actor_infer.generating_args.top_k": 50,
            "actor_infer.generating_args.repetition_penalty": 1.1,
            "train_infer_correction.is_weight": {},
        },
        says("train_infer_correction", "top_k", "50", "repetition_penalty", "1.1", "1"),
    ),
    (
        {
            "actor_infer.generating_args.top_k": 50,
            "use_rollout_log_probs": True,
            "add_token_level_kl": True,
            "init_kl_coef": 0.1,
        },
        says("use_rollout_log_probs", "top_k", "add_token_level_kl"),
    ),
    (
        {"actor_infer.generating_args.top_k": 50, "use_rollout_log_probs": True, "pg_variant": "clip_cov"},
        says("use_rollout_log_probs", "clip_cov", "top_k"),
    ),
    (
        {"actor_infer.generating_args.top_k": 50, "use_rollout_log_probs": True, "pg_variant": "kl_cov"},
        says("use_rollout_log_probs", "kl_cov", "top_k"),
    ),
    (
        {"train_infer_correction.filters": [{"ratio_low": 2.0, "ratio_high": 1.0}]},
        r"filters\[0\]: ratio_low 2.0 isn't",
    ),
    ({"deterministic": True, "train_env_manager.group_size_redundancy": 1}, "deterministic: true forbids"),
    (
        {"deterministic": True, "async_generation_ratio": 1, "stale_groups": "drop"},
        says("stale_groups", "drop", "deterministic"),
    ),
    ({"val_env_manager.group_size_redundancy": 1}, says("val_env_manager.group_size_redundancy", "remove")),
    (
        {
            "async_generation_ratio": 2,
            "actor_train.model_update_frequency": 3,
            "actor_infer.generating_args.top_p": 0.9,
        },
        says("async_generation_ratio", "4", "2", "model_update_frequency", "3", "1"),
    ),
    (
        {"deterministic": True, "custom_envs.Lake.use_thread_lock": True},
        says("custom_envs.Lake.use_thread_lock", "deterministic"),
    ),
    ({"deterministic": True, "save_steps": 3, "actor_train.model_update_frequency": 2}, "isn't a multiple"),
    (
        {"deterministic": True, "actor_infer.strategy_args.strategy_name": "vllm"},
        says("actor_infer.strategy_args.strategy_name", "vllm", "deterministic"),
    ),
    (
        {"actor_train.model_args.model_type": "token_classification"},
        "actor_train.model_args.model_type: token_cl.*value",
    ),
    (
        {"actor_infer.model_args.model_name_or_path": "models/other"},
        says("actor_infer.model_args.model_name_or_path", "models/other", "models/none"),
    ),
    (
        {"custom_envs": {}},
        says("custom_envs", "env_type: frozen_lake", "data.train_files"),
    ),
    (
        {"train_env_manager.tags": []},
        says("train_env_manager.tags", "[]", "Lake"),
    ),
    ({"val_env_manager.tags": []}, "val_env_manager.tags"),
    (
        {"tracker_kwargs.log_dri": "x"},
        says("tracker_kwargs.log_dri", "tensorboard", "log_dir", "'log_dir'"),
    ),
    (
        {"tracker_kwargs.tensorboard.log_dri": "x"},
        says("tracker_kwargs.tensorboard.log_dri", "log_dir", "'log_dir'"),
    ),
    ({"tracker_kwargs.tensorboard.log_dir": 3}, says("tracker_kwargs.tensorboard.log_dir", "3", "str")),
    ({"tracker_kwargs.tensorboard": "x"}, says("tracker_kwargs.tensorboard", "'x'", "mapping")),
    ({"tracker_kwargs.wandb.project": "x"}, says("tracker_kwargs.wandb", "track_with", "add wandb")),
    ({"tracker_kwargs.stdout.color": True}, says("tracker_kwargs.stdout.color", "stdout")),
    (
        {"track_with": ["stdout"], "tracker_kwargs.log_dir": "x"},
        says("tracker_kwargs.log_dir", "track_with", "stdout"),
    ),
    (
        {"track_with": ["tensorboard", "wandb"], "tracker_kwargs.log_dir": "x"},
        says("tracker_kwargs.log_dir", "tensorboard", "wandb"),
    ),
    (
        {"custom_envs.Lake.agent_template": "{observatio}"},
        says("custom_envs.Lake.agent_template", "'observation'", "{observatio}"),
    ),
    (
        {"custom_envs.Lake.agent_template": "{observation:d}"},
        says("custom_envs.Lake.agent_template", "{observation}", "format"),
    ),
    ({"custom_envs.Lake.agent_template": "{"}, says("custom_envs.Lake.agent_template", "brace")),
    (
        {"custom_envs.Lake.agent_template": "{history}"},
        says("custom_envs.Lake.agent_template", "{history}", "mode: step"),
    ),
    (
        {"custom_envs.Lake.mode": "step", "custom_envs.Lake.agent_template": "{histor}"},
        says("custom_envs.Lake.agent_template", "{histor}", "'history'"),
    ),
    ({"custom_envs.Lake.action_pattern": "("}, says("custom_envs.Lake.action_pattern", "'('", "0")),
    (
        {"custom_envs.Lake.agent_name": "tool_agnt"},
        says("custom_envs.Lake.agent_name", "'tool_agnt'", "env_agent"),
    ),
    (
        {"sequence_length": 64, "custom_envs.Lake.max_tokens_per_step": 64},
        says("custom_envs.Lake.max_tokens_per_step", "sequence_length", "64"),
    ),
    ({"ppo_epochs": "two"}, says("ppo_epochs", "'two'")),
    ({"ppo_epochs": True}, "valid integer"),
    ({"ppo_epochs": 0}, says("ppo_epochs", "1", "0")),
    ({"gamma": float("nan")}, says("gamma", "finite number")),
    ({"adv_estimator": "gigpoo"}, says("adv_estimator", "'gigpo'", "gigpoo")),
    ({"track_with": "tensorbord"}, says("track_with", "'tensorboard'", "tensorbord")),
]


@pytest.mark.parametrize("name", ["embedded", "hf", "vllm", "sglang"])
def test_every_server_may_let_responses_stand_still(name):
    config_of(
        **{
            "on_weight_update": "keep",
            "async_generation_ratio": 1,
            "actor_infer.strategy_args.strategy_name": name,
        }
    )


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[",".join(keys) for keys, _ in REFUSED])
def test_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**keys)


@pytest.mark.parametrize("asked", [0, -1, "1e6", 1e6, True])
def test_a_cache_bound_is_a_whole_number_of_bytes(asked: Any) -> None:
    with pytest.raises(
        ConfigError, match=says("actor_infer.strategy_args.strategy_config", "kv_cache_bytes", "at least 1")
    ):
        config_of(**{CACHE: asked})


@pytest.fixture
def small_llama(tmp_path: Path) -> dict[str, Any]:
    """A model whose context has 2,048 tokens, with 64 bytes of keys and values each."""
    shape = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "vocab_size": 8,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(shape | {"num_attention_heads": 2, "max_position_embeddings": 2048})
    )
    return {"pretrain": str(tmp_path)}


def test_a_context_that_the_model_cannot_hold(small_llama: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=says("sequence_length", "3000", "952", "2048")):
        config_of(**small_llama, sequence_length=3000)


def test_a_cache_that_holds_no_sequence(small_llama: dict[str, Any]) -> None:
    sized = small_llama | {"sequence_length": 1000}
    config_of(**sized)
    config_of(**sized | {CACHE: 64_000})
    with pytest.raises(ConfigError, match=says(CACHE, "63,999", "64 bytes", "1,000", "sequence_length")):
        config_of(**sized | {CACHE: 63_999})


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(
            rollout_batch_size=65, add_token_level_kl=True, ppo_epoch=2, train_env_manager={"grop_size": 4}
        )
    message = str(caught.value)
    assert "4 problems" in message
    for part in (
        "65 = 8",
        "init_kl_coef is 0",
        "ppo_epoch: unknown key",
        "train_env_manager.grop_size: unknown key",
    ):
        assert part in message


INEFFECTIVE: list[tuple[dict[str, Any], str]] = [
    ({"pg_clip_low": 0.1}, says("pg_clip_low", "use_pg_clip_range")),
    ({"sequence_length": 256, "prompt_length": 10}, says("prompt_length", "sequence_length")),
    ({"kl_horizon": 5.0}, says("kl_horizon", "target_kl")),
    ({"target_entropy": 0.3}, says("target_entropy", "entropy_loss_coef")),
    ({"step_reward_gamma": 0.9}, "step_reward_gamma"),
    ({"gamma": 0.9}, "gamma"),
    ({"init_kl_coef": 0.1}, "init_kl_coef"),
    ({"kl_loss_coef": 0.1}, "kl_loss_coef"),
    ({"value_clip": 0.2}, "value_clip"),
    (
        {"adv_estimator": "rloo", "gamma": 0.9},
        says("gamma", "adv_estimator", "discounts"),
    ),
    (
        {"adv_estimator": "rloo", "whiten_rewards": True},
        says("whiten_rewards", "adv_estimator", "whole scores"),
    ),
    (
        {"adv_estimator": "step_reinforce", "step_reward_weight": 2.0},
        says("step_reward_weight", "adv_estimator", "gigpo"),
    ),
    (
        {"adv_estimator": "gigpo", "step_reward_weight": 0, "step_reward_gamma": 0.5},
        says("step_reward_gamma", "step_reward_weight", "0"),
    ),
    (
        {"adv_estimator": "reinforce_plus_plus", "whiten_advantages": True},
        says("whiten_advantages", "adv_estimator", "whitens"),
    ),
    (
        {"adv_estimator": "gae", "reward_normalization.grouping": "tags"},
        says("reward_normalization.grouping", "groups"),
    ),
    ({"critic_warmup": 2}, says("critic_warmup", "adv_estimator", "no critic")),
    ({"reward_pretrain": "models/other"}, "reward_pretrain"),
    ({"critic.training_args.learning_rate": 1e-05}, "critic:"),
    ({"reference.model_args.dtype": "bf16", "reference.device_mapping": [1]}, "reference:"),
    ({"pg_variant": "vanilla", "pg_clip": 0.2}, "pg_clip"),
    (
        {"pg_variant": "my.losses:mine", "pg_clip": 0.3},
        says("pg_clip", "pg_variant", "pg_args"),
    ),
    (
        {"pg_variant": "gspo", "dual_clip_loss": False},
        says("dual_clip_loss", "pg_variant", "pg_args"),
    ),
    ({"pg_clip": 0.3, "pg_args.clip_low": 0.1}, says("pg_args.clip_low", "0.1", "0.3")),
    (
        {"train_infer_correction": {}},
        says("train_infer_correction", "is_weight", "filters"),
    ),
    (
        {
            "train_infer_correction.is_weight.enabled": False,
            "train_infer_correction.is_weight.upper_bound": 3.0,
        },
        says("train_infer_correction.is_weight.upper_bound", "train_infer_correction.is_weight.enabled"),
    ),
    (
        {"train_infer_correction.filters": [{"enabled": False, "ratio_high": 3.0}]},
        says("train_infer_correction.filters[0].ratio_high", "enabled"),
    ),
    ({"custom_envs.Lake.history_length": 2}, "custom_envs.Lake.history_length"),
    (
        {
            "custom_envs.Lake.mode": "step",
            "custom_envs.Lake.history_length": 2,
            "custom_envs.Lake.agent_template": "{observation}",
        },
        says("custom_envs.Lake.history_length", "agent_template", "{history}"),
    ),
    ({"actor_train.model_args.lora_alpha": 8.0}, "actor_train.model_args.lora_alpha"),
    ({"actor_train.use_sequence_packing": False}, "actor_train.use_sequence_packing"),
    ({"actor_train.max_tokens_per_microbatch_in_infer": 9}, "actor_train.max_tokens_per_microbatch_in_infer"),
    (
        {"actor_infer.training_args.learning_rate": 1.0},
        says("actor_infer.training_args", "actor_train"),
    ),
    ({"actor_infer.use_dynamic_batching_in_infer": True}, "actor_infer.use_dynamic_batching_in_infer"),
    (
        {"actor_infer.device_mapping": [1]},
        says("actor_infer.device_mapping", "first training device"),
    ),
    (
        {"use_kl_loss": True, "reference.training_args.learning_rate": 1.0},
        "reference.training_args.learning_rate",
    ),
    (
        {
            "use_kl_loss": True,
            "reference.training_args.per_device_train_batch_size": 2,
            "reference.use_dynamic_batching_in_infer": True,
        },
        "reference.training_args.per_device_train_batch_size",
    ),
    ({"trace.token2text": True}, says("trace.token2text", "trace.backend")),
    ({"trace.max_pending_mb": 9}, says("trace.max_pending_mb", "trace.backend")),
    (
        {"trace.backend": "mlflow", "trace.max_mb": 9},
        says("trace.max_mb", "traces.jsonl", "trace.backend"),
    ),
    ({"stream_training": True}, says("stream_training", "synchronous")),
    ({"data.val_files": "x.jsonl"}, says("data.val_files", "data.train_files")),
]


@pytest.mark.parametrize(("keys", "pattern"), INEFFECTIVE, ids=[",".join(keys) for keys, _ in INEFFECTIVE])
def test_a_key_without_effect_is_said_and_refused_when_strict(keys: dict[str, Any], pattern: str) -> None:
    (line,) = ineffective(config_of(**keys))
    assert re.match(pattern, line) and notes_of(**keys) == [line]
    with pytest.raises(ConfigError, match="has no effect"):
        parse_config(values_of(**keys), strict=True)


@pytest.mark.parametrize(("steps", "is_too_long"), [(8, False), (9, True)])
def test_a_warm_up_longer_than_the_run_is_said(steps: int, is_too_long: bool) -> None:
    """8 optimiser steps: 4 steps of 16 trajectories, 8 an optimiser step."""
    training = {"warmup_steps": steps, "learning_rate": 0.001, "per_device_train_batch_size": 8}
    small = {"rollout_batch_size": 16, "train_env_manager.num_env_groups": 2, "max_steps": 4}
    notes = ineffective(config_of(**small, **{"actor_train.training_args": training}))
    assert len(notes) == is_too_long
    if is_too_long:
        assert mentions(notes, "actor_train.training_args.warmup_steps", "9", "8 optimiser steps", "0.0009")


def test_a_curriculum_says_that_shares_have_no_effect() -> None:
    asked = {
        "custom_envs": {"Lake": LAKE, "Pond": LAKE},
        "train_env_manager": {"num_groups_partition": [2, 6]},
    }
    assert ineffective(config_of(**asked)) == []
    [line] = ineffective(config_of(**asked, data={"curriculum": True}))
    assert mentions(line, "train_env_manager.num_groups_partition", "data.curriculum")


def test_keys_that_work_or_ask_for_their_default_are_silent() -> None:
    assert ineffective(config_of(init_kl_coef=0.0, pg_clip=0.2, gamma=1.0, dual_clip_loss=False)) == []
    assert (
        ineffective(config_of(**{"custom_envs.Lake.mode": "step", "custom_envs.Lake.history_length": 2}))
        == []
    )
    reference = {"model_args": {"dtype": "bf16"}, "training_args": {"per_device_train_batch_size": 2}}
    assert ineffective(config_of(use_kl_loss=True, kl_loss_coef=0.1, reference=reference)) == []
    own = {
        "gamma": 0.9,
        "lambd": 0.5,
        "reward_placement": "turn",
        "reward_normalization": {"grouping": "batch"},
    }
    assert ineffective(config_of(adv_estimator="mine:Credit", **own)) == []
    assert (
        ineffective(config_of(adv_estimator="mine:Credit", step_reward_weight=0, step_reward_gamma=0.5)) == []
    )
    assert ineffective(config_of(sequence_length=128, prompt_length=64, response_length=64)) == []
    assert config_of(tracker_kwargs={"log_dir": "x"}).tracker_kwargs == {"log_dir": "x"}
    assert config_of(track_with="wandb", tracker_kwargs={"project": "x"}).track_with == ["wandb"]


def test_what_fine_tuning_leaves_unused() -> None:
    cut = {"use_dynamic_batching_in_train": False, "max_tokens_per_microbatch_in_train": 64}
    [line] = parse_config(SFT | cut, SFTConfig)[1]
    assert mentions(line, "max_tokens_per_microbatch_in_train", "use_dynamic_batching_in_train")
    assert parse_config(SFT | {"val_files": "val.jsonl"} | cut, SFTConfig)[1] == [], (
        "the validation is cut by tokens"
    )
    with pytest.raises(ConfigError, match="value head"):
        parse_config(values_of(SFT, **{"model_args.model_type": "token_classification"}), SFTConfig)
    [line] = unavailable(
        parse_config(values_of(SFT, **{"strategy_args.strategy_config.zero": 2}), SFTConfig)[0]
    )
    assert mentions(line, "strategy_args.strategy_config", "torch_train")


def test_this_version_runs_the_main_job() -> None:
    keys = {
        "add_token_level_kl": True,
        "init_kl_coef": 0.01,
        "target_kl": 0.1,
        "use_kl_loss": True,
        "deterministic": True,
    }
    keys |= {
        "use_rollout_log_probs": True,
        "entropy_loss_coef": 0.01,
        "whiten_advantages": True,
        "advantage_clip": 5.0,
    }
    assert unavailable(config_of(**keys, **{"custom_envs.Lake.mode": "step"})) == []


ROWS = {"data.train_files": "x.jsonl", "data.val_files": "x.jsonl", "data.reward": "exact_match"}
VLLM = "actor_infer.strategy_args.strategy_name"


@pytest.mark.parametrize(
    ("keys", "pattern", "is_for_playing"),
    [
        ({VLLM: "vllm"}, says(VLLM, "vllm", "library"), True),
        ({"custom_envs.Lake.tools": ["python"]}, says("custom_envs.Lake.tools", "tool"), True),
        (ROWS | {"data.default_agent": "react_agent"}, says("data.default_agent", "langgraph"), True),
        (
            {"actor_train.strategy_args.strategy_config.zero": 2},
            "actor_train.strategy_args.strategy_config",
            False,
        ),
    ],
)
def test_valid_settings_of_later_versions_are_named(
    keys: dict[str, Any], pattern: str, is_for_playing: bool
) -> None:
    config = config_of(**keys)
    assert any(re.search(pattern, line) for line in unavailable(config))
    assert any(re.search(pattern, line) for line in unavailable_to_play(config)) == is_for_playing


@pytest.mark.parametrize(
    "scorer",
    [
        {},
        {"agent.play": "own:play"},
        {"agent.command": ["own"]},
        {"agent.agent_config_path": "loops.yaml"},
        {"agent.interaction_config_path": "users.yaml"},
    ],
)
def test_rows_need_a_reward_unless_who_plays_them_may_score(scorer: dict[str, Any]) -> None:
    keys = {"data.train_files": "x.jsonl", "eval_steps": 0, **scorer}
    if scorer:
        assert config_of(**keys).may_score_rows
        return
    with pytest.raises(ConfigError, match=says("data.reward", "exact_match", "agent.play")):
        config_of(**keys)


def test_a_tracker_without_its_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    [line] = unavailable(config_of(track_with=["stdout", "wandb"]))
    assert mentions(line, "track_with", "wandb", "pip install -e '.[wandb]'")


@pytest.mark.parametrize(("version", "is_refused"), [("3.16.4", True), ("3.17.2", False), ("3.18.0", True)])
def test_traces_in_another_mlflow_are_refused_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_refused: bool
) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").touch()
    info = tmp_path / f"mlflow-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mlflow\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines = unavailable(config_of(**{"trace.backend": "mlflow"}))
    assert bool(lines) == is_refused and all(mentions(line, "trace.backend", version) for line in lines)


def test_traces_in_mlflow_take_the_arguments_of_its_tracker() -> None:
    uri = {"tracker_kwargs.mlflow.tracking_uri": "sqlite:///traces.db"}
    assert config_of(**{"trace.backend": "mlflow"}, **uri).trace.backend == "mlflow"
    with pytest.raises(ConfigError, match=says("tracker_kwargs.mlflow", "track_with")):
        config_of(**uri)


def test_an_environment_that_is_not_used_is_not_missed() -> None:
    keys = {
        "custom_envs": {"Lake": LAKE, "Shop": LAKE | {"tools": ["python"]}},
        "train_env_manager": {"tags": ["Lake"]},
    }
    assert unavailable(config_of(**keys)) == []


def test_defaults_that_are_written_out_are_not_missed() -> None:
    deadlines = {"request_s": 5.0, "env_s": 600.0, "train_s": 3600.0, "weights_s": 600.0}
    assert (
        unavailable(config_of(deadlines=deadlines, parity_max_logprob_diff=1e-3, stale_groups="wait")) == []
    )


def test_evaluation_needs_less_than_training() -> None:
    trainers = {"actor_train": {"strategy_args": {"strategy_name": "megatron_train"}}, "reward": {}}
    tags = {"train_env_manager": {"tags": ["Shop"]}, "val_env_manager": {"tags": ["Lake"]}}
    config = config_of(custom_envs={"Lake": LAKE, "Shop": LAKE | {"tools": ["python"]}}, **trainers, **tags)
    assert len(unavailable(config)) > 1 and unavailable_to_play(config) == []


STREAMED = {"async_generation_ratio": 1, "actor_train.training_args.per_device_train_batch_size": 64}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"adv_estimator": "gae"}, says("adv_estimator", "gae", "critic")),
        ({"adv_estimator": "gpg"}, says("adv_estimator", "gpg")),
        ({"adv_estimator": "reinforce_plus_plus"}, says("whitening", "whole batch")),
        ({"adv_estimator": "reinforce_plus_plus_baseline"}, says("whitening", "whole batch")),
        ({"whiten_advantages": True}, says("whitening", "whole batch")),
        ({"adv_estimator": "reinforce", "whiten_rewards": True}, says("whitening", "whole batch")),
        ({"reward_normalization.grouping": "batch"}, says("reward_normalization", "group")),
        ({"reward_normalization.grouping": "tags"}, says("reward_normalization", "group")),
        ({"reward_normalization.norm_std_type": "batch"}, says("reward_normalization", "group")),
        ({"reward_normalization.norm_mean_type": "running"}, says("reward_normalization", "group")),
        (
            {"add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.1},
            says("target_kl", "batches"),
        ),
        ({"entropy_loss_coef": 0.01, "target_entropy": 0.3}, says("target_entropy", "steps")),
        ({"pg_variant": "clip_cov"}, says("pg_variant", "clip_cov")),
        ({"ppo_epochs": 2}, says("ppo_epochs 2", "⌈64 samples / 64⌉")),
        ({"rollout_batch_size": 128}, says("ppo_epochs 1", "⌈128 samples / 64⌉")),
        ({"custom_envs.Lake.mode": "step", "custom_envs.Lake.max_steps": 3}, says("⌈192 samples / 64⌉")),
    ],
    ids=str,
)
def test_what_follows_from_the_whole_batch_is_not_streamed(keys, reason):
    """By default it is trained on at once; on demand it is refused."""
    assert not config_of(**STREAMED | keys).stream_training
    with pytest.raises(ConfigError, match=says("stream_training", "true") + reason):
        config_of(**STREAMED | keys | {"stream_training": True})


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"adv_estimator": "gigpo"},
        {"adv_estimator": "rloo"},
        {"adv_estimator": "remax"},
        {"adv_estimator": "agentic_reinforce"},
        {"adv_estimator": "opo", "use_kl_loss": True},
        {"add_token_level_kl": True, "init_kl_coef": 0.1},
        {"pg_variant": "gspo", "train_infer_correction": {"is_weight": {}, "filters": [{}]}},
        {"reward_normalization.method": "asym_clip"},
        {"adv_estimator": "step_reinforce", "custom_envs.Lake.mode": "step", "custom_envs.Lake.max_steps": 1},
    ],
    ids=str,
)
def test_what_groups_say_for_themselves_is_streamed_where_rollouts_go_on(keys):
    assert config_of(**STREAMED | keys).is_streamed
    assert not config_of(**STREAMED | keys | {"async_generation_ratio": 0}).stream_training
    assert not config_of(**STREAMED | keys | {"stream_training": False}).is_streamed


def test_nothing_is_known_of_own_estimators_and_agents_so_they_are_streamed_on_demand_only():
    for key, own in (("adv_estimator", "mine:Mine"), ("custom_envs.Lake.agent_name", "mine:Agent")):
        keys = STREAMED | {key: own}
        assert (
            not config_of(**keys).stream_training
            and config_of(**keys | {"stream_training": True}).is_streamed
        )
