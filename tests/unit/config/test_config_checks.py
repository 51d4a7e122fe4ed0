"""What is impossible or contradicts itself is refused with its reason; what has no effect is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_configs import LAKE, SFT, config_of, notes_of, values_of

from turnwise.config import SFTConfig, ineffective, parse_config, unavailable, unavailable_to_play
from turnwise.errors import ConfigError

SERVER = "actor_infer.strategy_args"
CACHE = f"{SERVER}.strategy_config.kv_cache_bytes"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"async_generation_ratio": 0.5}, "got 0.5; it must be a whole number of batches"),
    (
        {"reward_normalization.method": "identity"},
        "identity contradicts adv_estimator grpo.*mean_std.*reinforce",
    ),
    ({"adv_estimator": "rloo", "reward_normalization.method": "mean"}, "rloo centres scores in its own way"),
    (
        {"adv_estimator": "gae", "reward_normalization.method": "mean_std"},
        "reward_placement turn, gae works on single",
    ),
    ({"add_token_level_kl": True}, "init_kl_coef is 0"),
    ({"use_kl_loss": True, "kl_loss_type": "k1"}, "expected gradient of k1 is zero; use k3 or k2"),
    ({"use_kl_loss": True, "kl_loss_type": "abs"}, "abs estimates no KL"),
    (
        {"actor_train.learning_rate": 1e-5},
        r"actor_train.learning_rate: unknown key. It belongs in actor_train.training_args\.",
    ),
    ({"rollout_batch_size": 2}, "use 8"),
    ({"rollout_batch_size": 65}, r"65 = 8 × 8 \+ 1\); use 64 or 72"),
    ({"eval_steps": 1, "val_env_manager.group_size": 3}, r"128 = 42 × 3 \+ 2\); use 126 or 129"),
    ({"train_env_manager.num_groups_partition": [7]}, "7 = 7, but num_env_groups is 8"),
    ({"train_env_manager.num_groups_partition": [4, 4]}, "2 numbers for 1 tags"),
    ({"train_env_manager.tags": ["Lak"]}, "'Lak' isn't a tag of custom_envs.*Did you mean 'Lake'"),
    ({"train_env_manager.group_size": 1}, "1 leaves every advantage of grpo at 0"),
    ({"adv_estimator": "grpo_passk", "train_env_manager.group_size": 1}, "advantage of grpo_passk at 0"),
    (
        {"adv_estimator": "gigpo", "train_env_manager.group_size": 1},
        "1 leaves gigpo no siblings with whose turns",
    ),
    (
        {"adv_estimator": "gigpo", "reward_normalization.method": "identity"},
        "identity contradicts adv_estimator gigpo",
    ),
    (
        {"adv_estimator": "gigpo", "episode_reward_weight": 0, "step_reward_weight": 0},
        "every advantage would be 0",
    ),
    ({"adv_estimator": "remax", "whiten_rewards": True}, "score of a greedy sibling; use whiten_advantages"),
    (
        {"adv_estimator": "remax", "reward_normalization.grouping": "batch"},
        "remax centres scores in its own way",
    ),
    (
        {"adv_estimator": "remax", "group_filter": "non_zero_variance"},
        "group_filter: non_zero_variance drops .* adv_estimator remax learns from those too",
    ),
    (
        {"adv_estimator": "gae", "max_steps": 20, "critic_warmup": 20},
        "critic_warmup: the first 20 steps train only the critic, and max_steps is 20: .* use at most 19",
    ),
    ({"prompt_length": 100}, "set response_length too"),
    ({"actor_train.training_args.learning_rate": 0}, "learning_rate: input should be greater than 0"),
    (
        {
            "actor_train.training_args.lr_scheduler_type": "polynomial",
            "actor_train.training_args.learning_rate": 1e-7,
        },
        "actor_train.training_args.learning_rate: 1e-07 isn't above 1e-07, where lr_scheduler_type "
        "polynomial ends; raise",
    ),
    ({"actor_train.training_args.adam_beta2": 1}, "adam_beta2: input should be less than 1"),
    (
        {"pg_args.clip_hgh": 0.3},
        "pg_args.clip_hgh: pg_variant ppo has no such parameter.*Did you mean 'clip_high'",
    ),
    ({"pg_args.clip_low": -0.1}, "pg_args.clip_low: got -0.1; expected a number that isn't negative"),
    ({"pg_args.clip_low": "0.1"}, "pg_args.clip_low: got '0.1'; expected a number"),
    ({"pg_args.dual_clip": 1.0}, "1.0 would bound losses that no ratio has moved yet"),
    ({"pg_variant": "kimi15", "pg_args.tau": None}, "pg_args.tau: got None"),
    ({"pg_variant": "sapo", "pg_args.tau_positive": 0}, "0 isn't a temperature"),
    ({"pg_variant": "kl_cov", "pg_args.fraction": 2.0}, "2.0 isn't a share of the tokens"),
    ({"pg_variant": "tis", "pg_args.cap": 0}, "0 takes the weight, and with it the loss"),
    ({"pg_variant": "clip_cov", "pg_args.covariance_low": 6}, "6 isn't below covariance_high 5.0"),
    (
        {"adv_estimator": "gae", "group_filter": "non_zero_variance", "train_env_manager.group_size": 1},
        "those of group_size 1 can't",
    ),
    (
        {"pg_variant": "vanilla", "ratio_type": "segment"},
        "ratio_type: segment: pg_variant vanilla has no probability ratio",
    ),
    (
        {"pg_variant": "gspo", "ratio_type": "token"},
        "takes its ratio over a whole sequence; use segment for turns",
    ),
    (
        {"use_rollout_log_probs": True, "train_infer_correction.is_weight": {}},
        "every ratio is 1; remove one of the two",
    ),
    ({"group_filter": "odd"}, "'odd' isn't one of non_zero_variance"),
    (
        {"actor_train.strategy_args.strategy_name": "vllm"},
        "vllm can't do this role's work; use one of torch_train",
    ),
    (
        {SERVER: {"strategy_name": "hf", "strategy_config": {"max_length": 3}}},
        r"hf has no such option \(it has: n",
    ),
    (
        {SERVER: {"strategy_config": {"max_concurrency": 0}}},
        "max_concurrency is 0; it must be a whole number of",
    ),
    (
        {SERVER: {"strategy_name": "sglang", "strategy_config": {"url": "nowhere"}}},
        "url: got .nowhere.; it must be",
    ),
    (
        {SERVER: {"strategy_name": "sglang", "strategy_config": {"port": 99999}}},
        "port: got 99999; a port is a whole",
    ),
    (
        {SERVER: {"strategy_name": "sglang", "strategy_config": {"url": "http://a", "tp_size": 2}}},
        "url: that server has its options already; remove tp_size",
    ),
    ({"actor_infer.strategy_args.strategy_name": "torch_train"}, "use one of embedded, hf, vllm, sglang"),
    ({"actor_train.strategy_args.strategy_name": "torch_trian"}, "Did you mean 'torch_train'"),
    (
        {"adv_estimator": "gae", "critic.model_args.model_type": "causal_lm"},
        "causal_lm writes text; a critic has a value head, token_classification",
    ),
    (
        {
            "actor_train.device_mapping": [0, 1, 2],
            "actor_train.strategy_args.strategy_name": "megatron_train",
            "actor_train.strategy_args.strategy_config.tp_size": 2,
        },
        "3 devices don't hold whole copies",
    ),
    (
        {"actor_infer.generating_args.num_return_sequences": 4},
        "got 4; a task's siblings come from `group_size`",
    ),
    ({"actor_infer.generating_args.temperature": 0.0}, "greedy tokens can't be trained on"),
    (
        {"actor_infer.generating_args.top_p": 0.9, "train_infer_correction.is_weight": {}},
        "exp\\(old − sampled\\) isn't an importance ratio",
    ),
    (
        {"actor_infer.generating_args.top_k": 257, "use_rollout_log_probs": True},
        "with top_k 257 and .* Take top_k 1 to 256 beside",
    ),
    (
        {"actor_infer.generating_args.min_p": 0.1, "use_rollout_log_probs": True},
        "log_probs: .*with top_k 0 and repetition_penalty 1",
    ),
    (
        {
            "actor_infer.generating_args.top_k": 50,
            "actor_infer.generating_args.repetition_penalty": 1.1,
            "train_infer_correction.is_weight": {},
        },
        "with top_k 50 and repetition_penalty 1.1 .*repetition_penalty must be 1",
    ),
    (
        {
            "actor_infer.generating_args.top_k": 50,
            "use_rollout_log_probs": True,
            "add_token_level_kl": True,
            "init_kl_coef": 0.1,
        },
        "needs those over the whole vocabulary",
    ),
    (
        {"actor_infer.generating_args.top_k": 50, "use_rollout_log_probs": True, "pg_variant": "clip_cov"},
        "covariances of clip_cov need those over the whole vocabulary",
    ),
    (
        {"actor_infer.generating_args.top_k": 50, "use_rollout_log_probs": True, "pg_variant": "kl_cov"},
        "covariances of kl_cov need those over the whole vocabulary",
    ),
    (
        {"train_infer_correction.filters": [{"ratio_low": 2.0, "ratio_high": 1.0}]},
        r"filters\[0\]: ratio_low 2.0 isn't",
    ),
    ({"deterministic": True, "train_env_manager.group_size_redundancy": 1}, "deterministic: true forbids"),
    ({"deterministic": True, "async_generation_ratio": 1, "stale_groups": "drop"}, "drop lets time decide"),
    ({"val_env_manager.group_size_redundancy": 1}, "aren't a fair sample"),
    (
        {
            "async_generation_ratio": 2,
            "actor_train.model_update_frequency": 3,
            "actor_infer.generating_args.top_p": 0.9,
        },
        r"up to 4 steps \(2 \+ model_update_frequency 3 − 1\) old",
    ),
    ({"deterministic": True, "custom_envs.Lake.use_thread_lock": True}, "threads answer in any order"),
    ({"deterministic": True, "save_steps": 3, "actor_train.model_update_frequency": 2}, "isn't a multiple"),
    ({"deterministic": True, "actor_infer.strategy_args.strategy_name": "vllm"}, "vllm schedules by time"),
    (
        {"actor_train.model_args.model_type": "token_classification"},
        "actor_train.model_args.model_type: token_cl.*value",
    ),
    (
        {"actor_infer.model_args.model_name_or_path": "models/other"},
        "models/other isn't the model that is trained, actor_train.model_args.model_name_or_path models/none",
    ),
    (
        {"custom_envs": {}},
        r"custom_envs: there is nothing to train on; name an environment, such as custom_envs: \{Lake",
    ),
    (
        {"train_env_manager.tags": []},
        r"train_env_manager.tags: \[\] leaves nothing to play; name some of Lake",
    ),
    ({"val_env_manager.tags": []}, "val_env_manager.tags"),
    (
        {"tracker_kwargs.log_dri": "x"},
        "tracker_kwargs.log_dri: tensorboard takes log_dir. Did you mean 'log_dir'",
    ),
    (
        {"tracker_kwargs.tensorboard.log_dri": "x"},
        "tracker_kwargs.tensorboard.log_dri: tensorboard takes log_dir",
    ),
    ({"tracker_kwargs.tensorboard.log_dir": 3}, "log_dir: got 3; expected a str"),
    ({"tracker_kwargs.tensorboard": "x"}, "got 'x'; the arguments of a tracker are a mapping"),
    ({"tracker_kwargs.wandb.project": "x"}, "track_with is tensorboard, stdout; add wandb"),
    ({"tracker_kwargs.stdout.color": True}, "stdout takes no arguments"),
    (
        {"track_with": ["stdout"], "tracker_kwargs.log_dir": "x"},
        r"taken by no tracker of track_with \(stdout\)",
    ),
    (
        {"track_with": ["tensorboard", "wandb"], "tracker_kwargs.log_dir": "x"},
        "tensorboard or wandb; write it under",
    ),
    ({"custom_envs.Lake.agent_template": "{observatio}"}, "Did you mean 'observation'"),
    ({"custom_envs.Lake.agent_template": "{"}, "write a brace that is part of the text twice"),
    ({"custom_envs.Lake.agent_template": "{history}"}, r"\{history\} needs mode: step"),
    (
        {"custom_envs.Lake.mode": "step", "custom_envs.Lake.agent_template": "{histor}"},
        "of mode step.*Did you mean 'history'",
    ),
    ({"custom_envs.Lake.action_pattern": "("}, "isn't a regular expression"),
    ({"custom_envs.Lake.agent_name": "tool_agnt"}, "'tool_agnt' isn't one of"),
    ({"sequence_length": 64, "custom_envs.Lake.max_tokens_per_step": 64}, "leave no room for a prompt"),
    ({"ppo_epochs": "two"}, "ppo_epochs: input should be a valid integer.*got 'two'"),
    ({"ppo_epochs": True}, "valid integer"),
    ({"ppo_epochs": 0}, "greater than or equal to 1"),
    ({"gamma": float("nan")}, "finite number|less than or equal"),
    ({"adv_estimator": "gigpoo"}, "Did you mean 'gigpo'"),
    ({"track_with": "tensorbord"}, "Did you mean 'tensorboard'"),
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


@pytest.mark.parametrize(
    ("keys", "message"), REFUSED, ids=lambda value: value[:40] if isinstance(value, str) else None
)
def test_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        config_of(**keys)


@pytest.mark.parametrize("asked", [0, -1, "1e6", 1e6, True])
def test_a_cache_bound_is_a_whole_number_of_bytes(asked: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)strategy_config: .*kv_cache_bytes is .*whole number of at least 1"
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
    with pytest.raises(ConfigError, match="3000 tokens are 952 more than the 2048"):
        config_of(**small_llama, sequence_length=3000)


def test_a_cache_that_holds_no_sequence(small_llama: dict[str, Any]) -> None:
    sized = small_llama | {"sequence_length": 1000}
    config_of(**sized)
    config_of(**sized | {CACHE: 64_000})
    message = (
        "63,999 can't hold one sequence: 64 bytes per token × sequence_length 1,000 = 64,000; raise "
        "it, or lower"
    )
    with pytest.raises(ConfigError, match=f"{CACHE}: {message}"):
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
    ({"pg_clip_low": 0.1}, "pg_clip_low: has no effect: needs use_pg_clip_range"),
    ({"sequence_length": 256, "prompt_length": 10}, "prompt_length: has no effect: sequence_length is set."),
    ({"kl_horizon": 5.0}, "kl_horizon: has no effect: needs target_kl"),
    ({"step_reward_gamma": 0.9}, "step_reward_gamma"),
    ({"gamma": 0.9}, "gamma"),
    ({"init_kl_coef": 0.1}, "init_kl_coef"),
    ({"kl_loss_coef": 0.1}, "kl_loss_coef"),
    ({"value_clip": 0.2}, "value_clip"),
    (
        {"adv_estimator": "rloo", "gamma": 0.9},
        "gamma: has no effect: this adv_estimator discounts nothing by gamma",
    ),
    (
        {"adv_estimator": "rloo", "whiten_rewards": True},
        "whiten_rewards: has no effect: this adv_estimator works on whole",
    ),
    ({"adv_estimator": "step_reinforce", "step_reward_weight": 2.0}, "step_reward_weight: has no effect"),
    (
        {"adv_estimator": "gigpo", "step_reward_weight": 0, "step_reward_gamma": 0.5},
        "step_reward_gamma: has no effect: step_",
    ),
    (
        {"adv_estimator": "reinforce_plus_plus", "whiten_advantages": True},
        "whiten_advantages: has no effect: this adv_estima",
    ),
    (
        {"adv_estimator": "gae", "reward_normalization.grouping": "tags"},
        "reward_normalization.grouping: has no effect",
    ),
    ({"critic_warmup": 2}, "critic_warmup: has no effect: this adv_estimator has no critic"),
    ({"reward_pretrain": "models/other"}, "reward_pretrain"),
    ({"critic.training_args.learning_rate": 1e-05}, "critic:"),
    ({"reference.model_args.dtype": "bf16", "reference.device_mapping": [1]}, "reference:"),
    ({"pg_variant": "vanilla", "pg_clip": 0.2}, "pg_clip"),
    (
        {"pg_variant": "my.losses:mine", "pg_clip": 0.3},
        "pg_clip: has no effect: this pg_variant has no such clip",
    ),
    (
        {"pg_variant": "gspo", "dual_clip_loss": False},
        "dual_clip_loss: has no effect: this pg_variant has no dual clip",
    ),
    ({"pg_clip": 0.3, "pg_args.clip_low": 0.1}, "pg_args.clip_low: 0.1 takes the place of 0.3"),
    (
        {"train_infer_correction": {}},
        "train_infer_correction: has no effect: it names neither is_weight nor filters",
    ),
    (
        {
            "train_infer_correction.is_weight.enabled": False,
            "train_infer_correction.is_weight.upper_bound": 3.0,
        },
        "train_infer_correction.is_weight.upper_bound: has no effect",
    ),
    (
        {"train_infer_correction.filters": [{"enabled": False, "ratio_high": 3.0}]},
        "train_infer_correction.filters[0].ratio_high: has no effect",
    ),
    ({"custom_envs.Lake.history_length": 2}, "custom_envs.Lake.history_length"),
    (
        {
            "custom_envs.Lake.mode": "step",
            "custom_envs.Lake.history_length": 2,
            "custom_envs.Lake.agent_template": "{observation}",
        },
        "custom_envs.Lake.history_length: has no effect: agent_template shows no {history}",
    ),
    ({"actor_train.model_args.lora_alpha": 8.0}, "actor_train.model_args.lora_alpha"),
    ({"actor_train.use_sequence_packing": False}, "actor_train.use_sequence_packing"),
    ({"actor_train.max_tokens_per_microbatch_in_infer": 9}, "actor_train.max_tokens_per_microbatch_in_infer"),
    (
        {"actor_infer.training_args.learning_rate": 1.0},
        "actor_infer.training_args: has no effect: actor_train trains",
    ),
    ({"actor_infer.use_dynamic_batching_in_infer": True}, "actor_infer.use_dynamic_batching_in_infer"),
    (
        {"actor_infer.device_mapping": [1]},
        "actor_infer.device_mapping: has no effect: the servers are on the first training device",
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
    ({"trace.token2text": True}, "trace.token2text: has no effect: needs trace.backend"),
    ({"stream_training": True}, "stream_training: has no effect: training is synchronous."),
    ({"data.val_files": "x.jsonl"}, "data.val_files: has no effect: there are no data.train_files"),
]


@pytest.mark.parametrize(
    ("keys", "sentence"), INEFFECTIVE, ids=lambda value: value if isinstance(value, str) else None
)
def test_a_key_without_effect_is_said_and_refused_when_strict(keys: dict[str, Any], sentence: str) -> None:
    (line,) = ineffective(config_of(**keys))
    assert line.startswith(sentence) and notes_of(**keys) == [line]
    with pytest.raises(ConfigError, match="has no effect"):
        parse_config(values_of(**keys), strict=True)


LONG = (
    "actor_train.training_args.warmup_steps: 9 is more than the 8 optimiser steps of the run, so the "
    "learning rate ends at 0.0009 and never reaches 0.001."
)


@pytest.mark.parametrize(("steps", "said"), [(8, []), (9, [LONG])])
def test_a_warm_up_longer_than_the_run_is_said(steps: int, said: list[str]) -> None:
    """8 optimiser steps: 4 steps of 16 trajectories, 8 an optimiser step."""
    training = {"warmup_steps": steps, "learning_rate": 0.001, "per_device_train_batch_size": 8}
    small = {"rollout_batch_size": 16, "train_env_manager.num_env_groups": 2, "max_steps": 4}
    assert ineffective(config_of(**small, **{"actor_train.training_args": training})) == said


def test_a_curriculum_says_that_shares_have_no_effect() -> None:
    asked = {
        "custom_envs": {"Lake": LAKE, "Pond": LAKE},
        "train_env_manager": {"num_groups_partition": [2, 6]},
    }
    assert ineffective(config_of(**asked)) == []
    [line] = ineffective(config_of(**asked, data={"curriculum": True}))
    assert line.startswith(
        "train_env_manager.num_groups_partition: has no effect: data.curriculum draws the tags"
    )


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
    assert line.startswith("max_tokens_per_microbatch_in_train: has no effect")
    assert parse_config(SFT | {"val_files": "val.jsonl"} | cut, SFTConfig)[1] == [], (
        "the validation is cut by tokens"
    )
    with pytest.raises(ConfigError, match="value head"):
        parse_config(values_of(SFT, **{"model_args.model_type": "token_classification"}), SFTConfig)
    [line] = unavailable(
        parse_config(values_of(SFT, **{"strategy_args.strategy_config.zero": 2}), SFTConfig)[0]
    )
    assert line.startswith(
        "strategy_args.strategy_config: an option of torch_train or torch_infer isn't supported yet"
    )


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
    ("keys", "part", "is_for_playing"),
    [
        ({VLLM: "vllm"}, f"{VLLM}: vllm needs a library that isn't installed", True),
        ({"custom_envs.Lake.tools": ["python"]}, "custom_envs.Lake.tools: a tool in an environment", True),
        ({"custom_envs.Lake.agent_name": "react_agent"}, "custom_envs.Lake.agent_name: react_agent", True),
        ({"custom_envs": {"Lake": {"env_type": "webshop"}}}, "webshop isn't supported yet", True),
        (ROWS | {"data.default_agent": "react_agent"}, "data.default_agent", True),
        ({"trace.backend": "jsonl"}, "tracing", True),
        (
            {"actor_train.strategy_args.strategy_config.zero": 2},
            "actor_train.strategy_args.strategy_config",
            False,
        ),
    ],
)
def test_valid_settings_of_later_versions_are_named(
    keys: dict[str, Any], part: str, is_for_playing: bool
) -> None:
    config = config_of(**keys)
    assert any(part in line for line in unavailable(config))
    assert any(part in line for line in unavailable_to_play(config)) == is_for_playing


def test_a_tracker_without_its_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert unavailable(config_of(track_with=["stdout", "wandb"])) == [
        "track_with wandb needs a library that isn't installed; pip install -e '.[wandb]' in turnwise's "
        "checkout."
    ]


def test_an_environment_that_is_not_used_is_not_missed() -> None:
    keys = {
        "custom_envs": {"Lake": LAKE, "Shop": {"env_type": "webshop"}},
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
    config = config_of(custom_envs={"Lake": LAKE, "Shop": {"env_type": "webshop"}}, **trainers, **tags)
    assert len(unavailable(config)) > 1 and unavailable_to_play(config) == []


STREAMED = {"async_generation_ratio": 1, "actor_train.training_args.per_device_train_batch_size": 64}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"adv_estimator": "gae"}, "adv_estimator gae trains a critic"),
        ({"adv_estimator": "gpg"}, "adv_estimator gpg scales advantages by the whole batch"),
        ({"adv_estimator": "reinforce_plus_plus"}, "whitening is over the whole batch"),
        ({"adv_estimator": "reinforce_plus_plus_baseline"}, "whitening is over the whole batch"),
        ({"whiten_advantages": True}, "whitening is over the whole batch"),
        ({"adv_estimator": "reinforce", "whiten_rewards": True}, "whitening is over the whole batch"),
        ({"reward_normalization.grouping": "batch"}, "reward_normalization looks beyond a group"),
        ({"reward_normalization.grouping": "tags"}, "reward_normalization looks beyond a group"),
        ({"reward_normalization.norm_std_type": "batch"}, "reward_normalization looks beyond a group"),
        ({"reward_normalization.norm_mean_type": "running"}, "reward_normalization looks beyond a group"),
        (
            {"add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.1},
            "target_kl adapts to whole batches",
        ),
        ({"pg_variant": "clip_cov"}, "pg_variant clip_cov chooses among the tokens of a whole step"),
        ({"ppo_epochs": 2}, r"up to 2 optimiser steps \(ppo_epochs 2 × ⌈64 samples / 64⌉"),
        ({"rollout_batch_size": 128}, r"up to 2 optimiser steps \(ppo_epochs 1 × ⌈128 samples / 64⌉"),
        ({"custom_envs.Lake.mode": "step", "custom_envs.Lake.max_steps": 3}, r"up to 3 .*⌈192 samples / 64⌉"),
    ],
    ids=str,
)
def test_what_follows_from_the_whole_batch_is_not_streamed(keys, reason):
    """By default it is trained on at once; on demand it is refused."""
    assert not config_of(**STREAMED | keys).stream_training
    with pytest.raises(
        ConfigError, match=f"stream_training: true trains on the groups of a step as they end, but .*{reason}"
    ):
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
