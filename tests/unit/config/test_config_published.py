"""Files written for the published systems load: their keys are mapped, or answered with a sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest
from messages import says
from settings.leaves import value_at
from small_configs import config_of, notes_of, values_of

from turnwise.config import parse_config, unavailable
from turnwise.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "path", "expected"),
    [
        ({"actor_train.pg_variant": "topr"}, "pg_variant", "topr"),
        ({"actor_train.model_args.flash_attn": "fa2"}, "actor_train.model_args.attn_implementation", "fa2"),
        (
            {"actor_train.model_args.flash_attn": "disabled"},
            "actor_train.model_args.attn_implementation",
            "eager",
        ),
        (
            {"actor_train.model_args.lora_rank": 8, "actor_train.model_args.lora_target": "q_proj, v_proj"},
            "actor_train.model_args.lora_target",
            ["q_proj", "v_proj"],
        ),
        (
            {"reference.strategy_args.strategy_name": "hf_infer"},
            "reference.strategy_args.strategy_name",
            "torch_infer",
        ),
        (
            {"actor_infer.strategy_args.strategy_name": "hf_infer"},
            "actor_infer.strategy_args.strategy_name",
            "hf",
        ),
        ({"actor_infer.generating_args.top_k": -1}, "actor_infer.generating_args.top_k", 0),
        ({"train_env_manager.group_filter_cls": "my.filters.Keep"}, "group_filter", "my.filters:Keep"),
        (
            {"train_env_manager.group_filter_cls": "roll.pipeline.agentic.agentic_pipeline.GroupFilter"},
            "group_filter",
            None,
        ),
        ({"reward_normalization.grouping": "state"}, "reward_normalization.grouping", "traj_group_id"),
        ({"reward_normalization.grouping": "inductive"}, "reward_normalization.grouping", "tags"),
        ({"add_token_level_kl": True, "init_kl_coef": 0.1, "kl_penalty": "mse"}, "kl_penalty", "k2"),
        ({"use_kl_loss": True, "kl_loss_type": "low_var"}, "kl_loss_type", "k3"),
        ({"track_with": "tensorboard"}, "track_with", ["tensorboard"]),
        ({"async_generation_ratio": 1.0}, "async_generation_ratio", 1),
        ({"rollout_name": "hf", "actor_infer": None}, "actor_infer.strategy_args.strategy_name", "hf"),
    ],
)
def test_mapped(keys: dict[str, Any], path: str, expected: object) -> None:
    assert value_at(config_of(**keys), tuple(path.split("."))) == expected


@pytest.mark.parametrize(
    ("keys", "name", "expected"),
    [
        (
            {"env_manager_cls": "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"},
            "mode",
            "trajectory",
        ),
        (
            {"env_manager_cls": "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"},
            "mode",
            "step",
        ),
        ({"max_actions_per_traj": 7}, "max_steps", 7),
        ({"env_config.max_steps": 6}, "max_steps", 6),
        ({"max_steps": 5, "env_config.max_steps": 6}, "max_steps", 5),
        ({"env_config.action_pattern": "(.*)"}, "action_pattern", "(.*)"),
        ({"action_pattern": "a", "env_config.action_pattern": "(.*)"}, "action_pattern", "a"),
        ({"env_config.special_token_list": ["x"], "env_config.size": 5}, "env_config", {"size": 5}),
        ({"agent_name": "RectAgentLoop"}, "agent_name", "react_agent"),
        ({"agent_name": "tool_agent_loop"}, "agent_name", "tool_agent"),
    ],
)
def test_mapped_in_an_environment(keys: dict[str, Any], name: str, expected: object) -> None:
    env = config_of(**{f"custom_envs.Lake.{key}": value for key, value in keys.items()}).custom_envs["Lake"]
    assert env.__dict__[name] == expected
    assert "action_pattern" not in env.env_config and "max_steps" not in env.env_config


@pytest.mark.parametrize(
    "keys",
    [
        {
            "actor_train": {
                "pg_variant": None,
                "topr_positive_weight": None,
                "model_args": {"flash_attn": None},
            }
        },
        {"custom_envs.Lake.max_actions_per_traj": None},
    ],
)
def test_a_published_key_that_is_null_is_not_set(keys: dict[str, Any]) -> None:
    assert config_of(**keys) == config_of()


NUMBERED = {8: {"env_type": "frozen_lake", "env_config": {"max_steps": 3}, "max_steps": 5}}
MANAGED = {"custom_envs.Lake.env_manager_cls": "roll.TrajEnvManager"}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"rollout_name": "hf", "actor_infer": 3}, r"actor_infer: .*\(got 3\)"),
        ({"custom_envs": NUMBERED}, r"custom_envs\[8\]: "),
        ({**MANAGED, "train_env_manager.tags": 8}, r"train_env_manager.tags: .*\(got 8\)"),
        ({**MANAGED, "train_env_manager.tags": [{"Lake": 1}]}, r"train_env_manager.tags\[0\]: "),
    ],
)
def test_a_published_key_beside_a_value_of_another_type_leaves_that_to_the_check_of_types(
    keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_of(**keys)


def test_an_environment_of_ones_own_keeps_its_arguments() -> None:
    env = {"env_type": "mine:Env", "env_config": {"max_steps": 6}}
    assert config_of(custom_envs={"Mine": env}).custom_envs["Mine"].env_config == {"max_steps": 6}


@pytest.mark.parametrize(
    "name", ["VLTrajEnvManager", "AgentNativeStepEnvManager", "StepConcatEnvManager", "ProxyEnvManager"]
)
def test_managers_that_this_version_lacks_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=says("custom_envs.Lake.env_manager_cls", name)):
        config_of(**{"custom_envs.Lake.env_manager_cls": f"roll.pipeline.agentic.x.{name}"})


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ({"router_args.router_name": "EnvAffinityRouter"}, says("router_args", "replica")),
        (
            {"actor_train.worker_cls": "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker"},
            says("worker_cls", "pg_variant"),
        ),
        (
            {"actor_train.infer_batch_size": 2},
            says("actor_train.infer_batch_size", "use_dynamic_batching_in_infer"),
        ),
        ({"actor_train.data_args.template": "qwen2_5"}, says("data_args", "tokenizer")),
        ({"num_nodes": 2}, says("num_nodes", "device_mapping")),
        ({"think_action_pattern": "x"}, says("think_action_pattern", "variable")),
    ],
)
def test_idle_keys_are_dropped_with_a_sentence(keys: dict[str, Any], pattern: str) -> None:
    note, *others = notes_of(**keys)
    assert re.search(pattern, note) and all("other defaults" in other for other in others)
    parse_config(values_of(**keys), strict=True)


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ({"system_envs.A": "1"}, says("system_envs", "shell")),
        ({"train_env_manager.format_penalty": -0.15}, says("train_env_manager.format_penalty", "env_config")),
        ({"rollout_dump_dir": "/x"}, says("rollout_dump_dir", "rollouts.jsonl")),
        ({"batch_adjust_mode": "copy"}, says("batch_adjust_mode", "copied")),
        ({"checkpoint_config.async_upload": True}, says("checkpoint_config.async_upload", "file system")),
        ({"custom_envs.Lake.max_env_step_concurrent": 4}, says("max_env_step_concurrent", "use_thread_lock")),
    ],
)
def test_keys_without_counterpart_are_dropped_with_a_sentence(keys: dict[str, Any], pattern: str) -> None:
    note, *others = notes_of(**keys)
    assert re.search(pattern, note) and all("other defaults" in other for other in others)
    with pytest.raises(ConfigError, match=pattern):
        parse_config(values_of(**keys), strict=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"actor_train.worker_cls": "my.workers.Mine"}, says("actor_train.worker_cls", "strategy_name")),
        ({"train_env_manager.llm_proxy.proxy_type": "openai"}, "turnwise play"),
        ({"use_opd": True}, says("use_opd", "distillation")),
        ({"cluster.address": "ray://head:10001"}, says("cluster.address", "ray job submit")),
        ({"actor_infer.generating_args.num_beams": 4}, says("generating_args.num_beams", "beams")),
        ({"custom_envs.Lake.env_manager_cls": "my.ProxyManager"}, says("env_manager_cls", "agent loop")),
        ({"pg_variant": "tis", "actor_train.pg_variant": "topr"}, says("pg_variant", "tis", "topr")),
        (
            {"rollout_batch_size": 128, "train_env_manager.max_traj_per_env": 1},
            says("max_traj_per_env", "64", "rollout_batch_size"),
        ),
        ({"kl_penalty": "full"}, "kl_penalty"),
        (
            {"train_infer_correction.filters": [{"diff_enabled": True, "diff_low": -0.2, "diff_high": 0.2}]},
            says("filters[0].diff_enabled", "exp(old)"),
        ),
        (
            {"train_infer_correction.is_weight.upper_bound": None},
            says("is_weight.upper_bound", "null"),
        ),
    ],
)
def test_what_would_do_something_else_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**keys)


FILTER = {"agg_type": "sequence", "ratio_low": 0.9, "ratio_high": 1.1}


@pytest.mark.parametrize(
    ("keys", "is_enabled", "said"),
    [
        ({"ratio_enabled": True, "diff_enabled": False}, True, []),
        ({"ratio_enabled": True, "diff_low": -0.1}, True, [says("diff_low", "diff_enabled")]),
        (
            {"ratio_enabled": False},
            False,
            [says("filters[0].ratio_enabled"), "agg_type", "ratio_low", "ratio_high"],
        ),
    ],
)
def test_a_published_filter_of_ratios_is_ours(
    keys: dict[str, Any], is_enabled: bool, said: list[str]
) -> None:
    config, notes = parse_config(values_of(**{"train_infer_correction.filters": [FILTER | keys]}))
    assert config.train_infer_correction is not None
    [band] = config.train_infer_correction.filters
    assert (band.agg_type, band.ratio_low, band.ratio_high, band.enabled) == (
        "sequence",
        0.9,
        1.1,
        is_enabled,
    )
    assert len(notes) == len(said) and all(
        re.search(part, note) for part, note in zip(said, notes, strict=True)
    )


def test_harmless_values_are_dropped_silently() -> None:
    manager = {"llm_proxy": {"proxy_type": "policy"}, "max_traj_per_env": -1, "format_penalty": 0}
    keys = {"use_opd": False, "actor_infer.generating_args.num_beams": 1, "train_env_manager": manager}
    assert notes_of(**keys) == []


def test_the_second_systems_agents_and_names() -> None:
    limits = {
        "max_assistant_turns": 3,
        "max_user_turns": 2,
        "max_parallel_calls": 4,
        "max_tool_response_length": 99,
        "tool_response_truncate_side": "left",
        "function_tool_path": "tools.py",
    }
    loops = {"agent_loop_config_path": "loops.yaml", "default_agent_loop": "tool_agent_loop"}
    rollout = {"multi_turn": {**limits, "format": "gpt-oss"}, "agent": loops}
    data = {"train_files": "rows.jsonl", "reward": "gsm8k"}
    trainer = {"project_name": "sums", "experiment_name": "first"}
    keys = {"data": data, "eval_steps": 0, "actor_rollout_ref.rollout": rollout, "trainer": trainer}
    config = config_of(**keys, track_with=["stdout", "mlflow"])
    assert {name: config.agent.__dict__[name] for name in limits} == limits
    assert (config.agent.tool_parser, config.agent.agent_config_path) == ("gpt_oss", "loops.yaml")
    assert (config.data.default_agent, config.exp_name) == ("tool_agent", "first")
    assert config.tracker_kwargs == {"mlflow": {"experiment_name": "sums"}}
    traced = config_of(**keys, track_with=["stdout"], trace={"backend": "mlflow"})
    assert traced.tracker_kwargs == {"mlflow": {"experiment_name": "sums"}}
    direct = config_of(**keys, track_with=["wandb"], tracker_kwargs={"mode": "offline"})
    assert direct.tracker_kwargs == {"mode": "offline", "project": "sums"}
    assert any("trainer.project_name" in note for note in notes_of(**keys))


def test_the_second_systems_overrides() -> None:
    keys = {"data.return_raw_chat": True, "actor_rollout_ref.rollout.mode": "async"}
    assert [note.partition(":")[2] for note in notes_of(**keys)] == [" always so here", " always async here"]
    assert unavailable(config_of(**keys)) == []
    users = {"tool_config_path": "tools.yaml", "interaction_config_path": "users.yaml"}
    rollout = {"name": "hf", "mode": "async", "multi_turn": users}
    data = {"train_files": "rows.jsonl", "reward": "gsm8k"}
    config = config_of(data=data, eval_steps=0, **{"actor_rollout_ref.rollout": rollout})
    assert (
        config.actor_infer.strategy_args.strategy_name == "hf"
        and config.agent.tool_config_path == "tools.yaml"
    )
    assert config.agent.interaction_config_path == "users.yaml"
    assert config_of(rollout_name="hf").actor_infer.strategy_args.strategy_name == "hf"
    message = says("multi_turn.use_inference_chat_template", "unknown")
    with pytest.raises(ConfigError, match=message):
        config_of(**{"actor_rollout_ref.rollout.multi_turn.use_inference_chat_template": True})
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.rollout.mode: unknown key"):
        config_of(**{"actor_rollout_ref.rollout.mode": "sync"})


def test_the_second_systems_traces() -> None:
    trace = {"backend": "mlflow", "token2text": True, "max_samples_per_step_per_worker": 3}
    config = config_of(**{"actor_rollout_ref.rollout.trace": trace})
    assert (config.trace.backend, config.trace.token2text, config.trace.max_samples_per_step) == (
        "mlflow",
        True,
        3,
    )
    assert config_of(**{"trace.backend": "mlflow"}).trace.max_samples_per_step == 1
    assert config_of(**{"trace.backend": "jsonl"}).trace.max_samples_per_step is None
    with pytest.raises(ConfigError, match=says("trace.backend", "weave", "jsonl", "mlflow")):
        config_of(**{"actor_rollout_ref.rollout.trace.backend": "weave"})
