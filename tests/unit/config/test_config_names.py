"""Keys of other systems are answered with ours: the path, and how the value converts."""

from __future__ import annotations

from typing import Any

import pytest
from messages import mentions
from small_configs import config_of

from turnwise.config import SFTConfig, parse_config
from turnwise.errors import ConfigError


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(**keys)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "ours", "how"),
    [
        ("beta", "kl_loss_coef", "use_kl_loss: true"),
        ("gradient_checkpointing", "actor_train.model_args.disable_gradient_checkpointing", "the opposite"),
        ("trainer.total_epochs", "data.num_epochs", "epochs"),
        ("trainer.val_before_train", "eval_steps", "first step"),
        ("max_tool_calling_iterations", "agent.max_assistant_turns", "plus 1"),
        ("actor_rollout_ref.actor.fsdp_config", "strategy_config", "verl's"),
        ("num_return_sequences_in_group", "train_env_manager.group_size", "the same number"),
        ("rollout.n", "train_env_manager.group_size", "the same number"),
        ("actor_rollout_ref.rollout.n", "train_env_manager.group_size", "the same number"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "gradient_accumulation_steps", "verl counts prompts"),
        ("critic.optim.lr", "critic.training_args.learning_rate", "the same number"),
        ("reward_model", "reward_pretrain", "the same folder"),
        ("reward_model.enable", "data.reward", "{name: reward_model}"),
    ],
)
def test_a_key_of_another_system_is_answered_with_ours(key: str, ours: str, how: str) -> None:
    """docs/coming_from.md has them all (`unit/docs/test_coming_from.py`)."""
    said = refusal(**{key: 1})
    assert mentions(said, f"{key}: ", ours, how) and "1 problem" in said


def test_every_key_below_an_unknown_section_is_answered() -> None:
    said = refusal(trainer={"total_epochs": 3, "save_freq": 10, "nothing_like_it": 1})
    assert "3 problems" in said and "'save_steps'" in said and "trainer.nothing_like_it: unknown key." in said


def test_what_has_no_counterpart_says_why() -> None:
    assert mentions(refusal(log_completions=True), "log_completions", "no counterpart", "rollouts.jsonl")


@pytest.mark.parametrize(
    "key",
    [
        "vllm_server_host",
        "adam_epsilon",
        "dataloader_num_workers",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.model.custom_chat_template",
        "actor_rollout_ref.actor.profiler.tool_config.nsys.discrete",
        "ray_kwargs.ray_init.num_cpus",
        "data.return_multi_modal_inputs",
        "actor_rollout_ref.rollout.load_format",
    ],
)
def test_a_published_key_is_never_answered_without_a_reason(key: str) -> None:
    assert mentions(refusal(**{key: 1}), key.partition(".")[0], "no counterpart")


@pytest.mark.parametrize(
    "key",
    [
        "hub_token",
        "group_by_length",
        "optim_args",
        "do_train",
        "task_type",
        "init_lora_weights",
        "lr_scheduler_kwargs",
        "actor_rollout_ref.model.use_liger",
        "actor_rollout_ref.ref.strategy",
    ],
)
def test_a_name_that_shares_parts_only_is_not_suggested(key: str) -> None:
    assert "mean" not in refusal(**{key: 1})


@pytest.mark.parametrize(
    ("typo", "ours"),
    [("train_env_manager.num_env_group", "num_env_groups"), ("rollout_batch", "rollout_batch_size")],
)
def test_a_slip_is_still_recognised(typo: str, ours: str) -> None:
    assert f"'{ours}'" in refusal(**{typo: 1})


@pytest.mark.parametrize(
    "place", ["temperature", "actor_train.temperature", "actor_train.generating_args.temprature"]
)
def test_sampling_belongs_to_the_role_that_samples(place: str) -> None:
    said = refusal(**{place: 0.7})
    assert "belongs in actor_train" not in said
    if "temprature" not in place:
        assert "actor_infer.generating_args.temperature" in said


def test_an_estimator_that_compares_states_is_refused_for_rows_without_them() -> None:
    rows = {"train_files": ["rows.jsonl"], "reward": "exact_match"}
    said = refusal(adv_estimator="gigpo", data=rows, custom_envs={})
    assert "adv_estimator: gigpo" in said and "state_key" in said and "data.default_agent" in said
    config_of(adv_estimator="gigpo", data=rows | {"default_agent": "loops:Mine"}, custom_envs={})


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("lr", "'training_args.learning_rate'"),
        ("max_length", "'sequence_length'"),
        ("num_generations", "`turnwise train`"),
    ],
)
def test_a_hint_for_fine_tuning_names_a_key_that_fine_tuning_has(key, ours):
    with pytest.raises(ConfigError) as refused:
        parse_config({"pretrain": "m", "train_files": "rows.jsonl", key: 3}, SFTConfig)
    assert ours in str(refused.value) and "'actor_train" not in str(refused.value)
