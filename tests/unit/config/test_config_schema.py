"""The defaults are those that the documents state, and what follows from other keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from messages import says
from small_configs import MINIMAL, SFT, config_of, values_of

from turnwise.config import AgenticConfig, SFTConfig, dump_yaml, load_config, parse_config, unavailable
from turnwise.config.place import place, smallest_machine
from turnwise.config.schema.model_shape import read_model_shape
from turnwise.errors import ConfigError
from turnwise.models.presets import PRESETS


def test_a_model_and_an_environment_are_enough() -> None:
    config, notes = parse_config(MINIMAL)
    assert notes == []
    assert (config.adv_estimator, config.pg_variant, config.loss_agg_mode) == ("grpo", "ppo", "token-mean")
    assert (config.reward_normalization.grouping, config.reward_normalization.method) == (
        "traj_group_id",
        "mean_std",
    )
    assert config.pg_args == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert (config.max_steps, config.rollout_batch_size, config.val_batch_size, config.sequence_length) == (
        200,
        64,
        128,
        4096,
    )
    assert (config.train_env_manager.tags, config.train_env_manager.group_size) == (["Lake"], 8)
    assert (config.val_env_manager.tags, config.val_env_manager.group_size) == (["Lake"], 1)
    assert (config.kl_loss_coef, config.kl_loss_type, config.kl_penalty, config.init_kl_coef) == (
        0.001,
        "k3",
        "k1",
        0,
    )
    assert list(config.active_roles) == ["actor_train", "actor_infer"]
    assert config.custom_envs["Lake"].action_pattern == r"<answer>(.*?)</answer>"


def test_resolved_values_do_not_count_as_set() -> None:
    config = config_of(pg_clip=0.1)
    assert config.pg_args["clip_low"] == 0.1
    assert config.model_fields_set == {"pretrain", "custom_envs", "pg_clip"}


def test_null_is_unset_where_a_key_has_no_null() -> None:
    config = config_of(**{"ppo_epochs": None, "render_save_dir": None, "actor_train.model_args": None})
    assert config.ppo_epochs == 1 and config.actor_train.model_args.dtype == "fp32"
    assert config_of(**{"custom_envs.Lake.action_pattern": None}).custom_envs["Lake"].action_pattern is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.28},
            {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0},
        ),
        ({"pg_clip_low": 0.1}, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        ({"dual_clip_loss": False}, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
        ({"pg_variant": "gspo"}, {"clip_low": 3e-4, "clip_high": 4e-4}),
        ({"pg_variant": "vanilla", "pg_clip": 0.2}, {}),
        ({"pg_variant": "tis", "pg_args.cap": 3.0}, {"cap": 3.0}),
    ],
)
def test_clips_end_in_the_parameters_of_the_variant(
    keys: dict[str, object], expected: dict[str, object]
) -> None:
    assert config_of(**keys).pg_args == expected


def test_variants_and_estimators_bring_their_own_defaults() -> None:
    config = config_of(pg_variant="gspo", adv_estimator="gae", gae_granularity="turn")
    assert (config.loss_agg_mode, config.lambd, config.reward_placement) == (
        "seq-mean-token-mean",
        0.95,
        "turn",
    )
    assert config.reward_normalization.method == "identity"
    assert config.needs_critic and config.critic.model_args.model_type == "token_classification"


def test_the_sampler_follows_the_trained_model() -> None:
    config = config_of(**{"actor_train.model_args.model_name_or_path": "models/other"})
    assert config.actor_infer.model_args.model_name_or_path == "models/other"
    assert config.reference.model_args.model_name_or_path == "models/none"


@pytest.mark.parametrize(
    ("keys", "derived"),
    [
        ({}, (False, False, "if_needed")),
        ({"stream_training": True}, (False, False, "if_needed")),
        ({"async_generation_ratio": 1}, (True, True, "always")),
        ({"async_generation_ratio": 1, "stream_training": False}, (True, False, "always")),
        ({"async_generation_ratio": 1, "use_rollout_log_probs": True}, (True, True, "rollouts")),
        ({"actor_train.device_mapping": [0, 1]}, (True, False, "if_needed")),
    ],
)
def test_what_follows_from_playing_ahead(keys: dict[str, object], derived: tuple[object, ...]) -> None:
    """The trainer gets a process of its own, steps are streamed, and old log-probs are always computed."""
    config = AgenticConfig.model_validate(values_of(rollout_batch_size=8, **keys))
    placement = place(config, smallest_machine(config))
    assert (placement.trains_apart, config.is_streamed, config.old_log_probs) == derived


def test_lora_raises_the_learning_rate() -> None:
    config = config_of(**{"actor_train.model_args.lora_rank": 8})
    assert config.actor_train.training_args.learning_rate == 1e-5
    assert config.actor_train.model_args.lora_alpha == 16


def test_sampling_takes_the_managers_own_before_the_samplers() -> None:
    keys = {
        "actor_infer.generating_args": {"max_new_tokens": 64, "temperature": 0.9},
        "val_env_manager.generating_args.temperature": 0.2,
        "custom_envs.Lake.max_tokens_per_step": 32,
        "custom_envs.Sea.env_type": "frozen_lake",
    }
    config = config_of(**keys)
    assert (config.sampling("train").temperature, config.sampling("val").temperature) == (0.9, 0.2)
    assert (config.max_new_tokens("train", "Lake"), config.max_new_tokens("val", "Sea")) == (32, 64)


def test_samples_of_an_optimizer_step_count_data_parallel_ranks() -> None:
    role = {
        "device_mapping": "list(range(0, 8))",
        "strategy_args": {
            "strategy_name": "megatron_train",
            "strategy_config": {"tensor_model_parallel_size": 2},
        },
        "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    }
    config = config_of(actor_train=role, ppo_epochs=2)
    assert config.actor_train.data_parallel_size == 4
    assert config.actor_train.samples_per_optimizer_step == 24
    assert config.optimizer_steps_per_batch() == 2 * 3


def config_json(size: str, **changes: int) -> str:
    preset = PRESETS[size]
    return json.dumps(
        {"model_type": preset.model_type, "vocab_size": preset.vocab_size, **preset.config, **changes}
    )


def test_sequence_length_from_its_parts_and_from_the_model(tmp_path: Path) -> None:
    assert config_of(prompt_length=100, response_length=28).sequence_length == 128
    (tmp_path / "config.json").write_text(config_json("qwen3-0.6b", max_position_embeddings=1024))
    assert config_of(pretrain=str(tmp_path)).sequence_length == 1024


@pytest.mark.parametrize(
    ("size", "num_parameters", "kv_bytes"),
    [("qwen3-0.6b", 596_049_920, 2 * 28 * 8 * 128 * 2), ("qwen2.5-0.5b", 494_032_768, 2 * 24 * 2 * 64 * 2)],
)
def test_presets_have_the_sizes_of_published_models(
    tmp_path: Path, size: str, num_parameters: int, kv_bytes: int
) -> None:
    (tmp_path / "config.json").write_text(config_json(size))
    shape = read_model_shape(str(tmp_path))
    assert shape is not None
    assert (shape.num_parameters, shape.kv_bytes_per_token("bf16")) == (num_parameters, kv_bytes)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": 3}'])
def test_a_strange_config_json_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert read_model_shape(str(tmp_path)) is None


def test_the_resolved_config_loads_to_itself(tmp_path: Path) -> None:
    keys = {
        "dual_clip_loss": False,
        "use_kl_loss": True,
        "eval_steps": 5,
        "actor_infer.generating_args.temperature": 0.8,
        "actor_train": {"device_mapping": [0], "training_args": {"learning_rate": 2e-4}},
        "reference.training_args.per_device_train_batch_size": 4,
        "val_env_manager.generating_args.do_sample": False,
    }
    first = config_of(**keys)
    (tmp_path / "run.yaml").write_text(dump_yaml(first))
    second, notes = load_config(tmp_path / "run.yaml", ["exp_name=turnwise"])
    assert notes == [] and unavailable(second) == [], "what is written out asks for nothing new"
    assert dump_yaml(second) == dump_yaml(first)
    assert second.sampling("val") == first.sampling("val")
    assert second.pg_args == first.pg_args


def test_sft_needs_little() -> None:
    config, _ = parse_config(SFT, SFTConfig)
    assert config.train_files == ["demos.jsonl"]
    assert config.training_args.learning_rate == 1e-5
    with pytest.raises(ConfigError, match=says("train_files", "set it")):
        parse_config({"pretrain": "models/none"}, SFTConfig)


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config_of().seed = 3  # type: ignore[misc]
