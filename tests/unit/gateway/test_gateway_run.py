"""A run that trains functions of users through the gateway."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import LETTERS, folder_of_run, measured, played, small_config, training

from turnwise.assemble.gateway import RunGateway
from turnwise.assemble.saved import replay_rollouts
from turnwise.config import AgenticConfig, parse_config
from turnwise.errors import ConfigError, NotAvailableError
from turnwise.examine.examined import examine
from turnwise.examine.problems import object_problems
from turnwise.protocols import PlaysInPlaces
from turnwise.runtime.event_loop import WatchedRunner


def gateway_config(model: Path, folder: Path, agent: dict[str, Any], **changes: Any) -> AgenticConfig:
    rows = [{"prompt": text, "answer": "a"} for text in ("P _ G", "G _ P", "_ P G", "P G _")]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values: dict[str, Any] = {
        "pretrain": str(model),
        "output_dir": str(folder / "runs"),
        "max_steps": 2,
        "save_steps": 0,
        "rollout_batch_size": 8,
        "sequence_length": 256,
        "track_with": [],
        "train_env_manager": {"num_env_groups": 2, "group_size": 4},
        "data": {
            "train_files": str(folder / "rows.jsonl"),
            "default_agent": "gateway",
            "reward": "toy_rewards:length",
        },
        "actor_infer": {"generating_args": {"max_new_tokens": 8}},
        "actor_train": training(),
        "agent": agent,
    }
    return parse_config(values | changes, AgenticConfig)[0]


@pytest.mark.parametrize("player", ["two_turns", "openai_client"])
def test_a_blocking_function_is_trained(tiny_model: Path, tmp_path: Path, player: str) -> None:
    config = gateway_config(tiny_model, tmp_path, {"play": f"http_players:{player}"})
    folder = folder_of_run(config)
    rows = played(folder)
    num_turns = 2 if player == "two_turns" else 1
    assert len(rows) == 16
    assert {row["status"] for row in rows} == {"finished"}
    assert all(len(row["turns"]) == num_turns for row in rows)
    assert all(turn["is_trained"] for row in rows for turn in row["turns"])
    assert all(row["answer"] is not None for row in rows)
    steps = measured(folder)
    assert all(step["actor_train/grad_norm"] > 0 for step in steps)
    assert steps[0]["env/data/gateway/delivered"] == num_turns
    assert steps[0]["env/data/gateway/contexts/first"] == 1
    assert replay_rollouts(examine(config), folder.rollouts) == (16, [])


def test_a_function_that_scores_itself_needs_no_reward(tiny_model: Path, tmp_path: Path) -> None:
    config = gateway_config(tiny_model, tmp_path, {"play": "http_players:forked"}, max_steps=1)
    config = config.model_copy(update={"data": config.data.model_copy(update={"reward": []})})
    rows = played(folder_of_run(config))
    assert {row["outcome_rewards"]["score"] for row in rows} == {0.5}


def test_an_environment_is_played_in_training_and_validation(tiny_model: Path, tmp_path: Path) -> None:
    letters = LETTERS | {"agent_name": "gateway", "agent_args": {"play": "http_players:letters"}}
    config = small_config(
        tiny_model,
        tmp_path,
        max_steps=1,
        eval_steps=1,
        val_batch_size=4,
        save_steps=0,
        custom_envs={"Letters": letters},
    )
    folder = folder_of_run(config)
    rows = played(folder)
    assert len(rows) == 8 and all(len(row["turns"]) == 2 for row in rows)
    assert any(turn["reward"] for row in rows for turn in row["turns"])
    assert measured(folder)[0]["val/env/Letters/env_steps"] == 2


def test_a_command_is_trained(tiny_model: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "support" / "http_command.py"
    config = gateway_config(tiny_model, tmp_path, {"command": [sys.executable, str(script)]}, max_steps=1)
    rows = played(folder_of_run(config))
    assert len(rows) == 8 and {row["status"] for row in rows} == {"finished"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "neither is set"),
    ({"play": "http_players:two_turns", "command": ["python3"]}, "both are set"),
    ({"play": "http_players:nothing"}, "http_players:nothing"),
    ({"play": "http_players:needs_more"}, "cookie"),
    ({"command": ["/no/such/program"]}, "no such program"),
    ({"play": "http_players:two_turns", "models": {"policy": "untrained"}}, "trained"),
    ({"play": "http_players:two_turns", "mistakes": ["http_players:post"]}, "mistakes"),
]


@pytest.mark.parametrize(("agent", "sentence"), BAD)
def test_what_is_played_is_checked_before_a_run(
    tiny_model: Path, tmp_path: Path, agent: dict[str, Any], sentence: str
) -> None:
    config = gateway_config(tiny_model, tmp_path, agent)
    [problem, *_] = object_problems(examine(config))
    assert sentence in problem.message


def test_a_run_without_aiohttp_names_its_extra(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gateway_config(tiny_model, tmp_path, {"play": "http_players:two_turns"})
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(NotAvailableError, match=r"aiohttp.*\[gateway\]"):
        list(object_problems(examine(config)))


def test_agents_of_commands_share_so_many_places_as_processes_may_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    command = {"command": [sys.executable, "-c", "pass"], "max_processes": 3}
    with WatchedRunner() as runner:
        gateway = RunGateway(gateway_config(tiny_model, tmp_path, command), runner)
        agents = [gateway.agent_of_rows(split) for split in ("train", "val")]
        assert isinstance(agents[0], PlaysInPlaces) and agents[0].places is agents[1].places
        assert agents[0].places is not None and agents[0].places._value == 3


def test_a_function_that_nothing_plays_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = gateway_config(tiny_model, tmp_path, {"play": "http_players:two_turns"})
    data = config.data.model_copy(update={"default_agent": "single_turn_agent"})
    [problem] = object_problems(examine(config.model_copy(update={"data": data})))
    assert problem.key == "agent.play" and "default_agent" in problem.message


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"deterministic": True}, "deterministic"),
    ({"adv_estimator": "gigpo"}, "adv_estimator"),
    ({"gateway": {"host": "0.0.0.0"}}, "gateway.public_url"),
    ({"gateway": {"public_url": "here"}}, "gateway.public_url"),
    ({"agent": {"play": "nothing"}}, "agent.play"),
]


@pytest.mark.parametrize(("changes", "key"), REFUSED)
def test_settings_that_contradict_the_gateway(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        gateway_config(tiny_model, tmp_path, **{"agent": {"play": "http_players:two_turns"}, **changes})


def test_mode_step_and_arguments_of_other_agents_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    stepwise = LETTERS | {"agent_name": "gateway", "mode": "step"}
    with pytest.raises(ConfigError, match=r"custom_envs\.Letters\.mode"):
        small_config(tiny_model, tmp_path, custom_envs={"Letters": stepwise})
    with pytest.raises(ConfigError, match=r"custom_envs\.Letters\.agent_args"):
        small_config(
            tiny_model, tmp_path, custom_envs={"Letters": LETTERS | {"agent_args": {"grace_s": 1.0}}}
        )
