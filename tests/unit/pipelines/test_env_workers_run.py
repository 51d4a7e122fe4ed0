"""Runs whose environments live in worker processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import LETTERS, assert_same_weights, measured, played, run_small, small_config

from turnwise.assemble.env_workers import shared_workers
from turnwise.config import AgenticConfig
from turnwise.errors import EnvWorkersDeadError

WORKERS = {"num_env_groups": 2, "group_size": 4, "max_env_num_per_worker": 3}


@pytest.fixture(autouse=True)
def ordinary_algorithms() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def config_of(
    model: Any, folder: Path, env_type: str, manager: dict[str, Any], **changes: Any
) -> AgenticConfig:
    env = {**LETTERS, "env_type": env_type, "env_config": changes.pop("env_config", {})}
    return small_config(
        model,
        folder,
        max_steps=2,
        custom_envs={"Letters": env},
        train_env_manager=manager,
        **changes,
    )


def test_a_deterministic_run_with_workers_is_that_without(tiny_model: Any, tmp_path: Path) -> None:
    pipelines = []
    for number in (0, 3):
        changes = {"deterministic": True, "eval_steps": 2, "adv_estimator": "gigpo"}
        manager = WORKERS | {"max_env_num_per_worker": number}
        val = {"num_env_groups": 2, "max_env_num_per_worker": number}
        config = config_of(
            tiny_model,
            tmp_path / str(number),
            "worker_envs:HomeEnv",
            manager,
            val_env_manager=val,
            render_save_dir=str(tmp_path / f"pictures{number}"),
            **changes,
        )
        pipelines.append(run_small(config))
    here, there = (pipeline.folder for pipeline in pipelines)
    assert measured(here) == measured(there)
    assert played(here) == played(there)
    assert_same_weights(*(pipeline.checkpoints.newest for pipeline in pipelines))
    pictures = [sorted((tmp_path / f"pictures{number}").rglob("*.gif")) for number in (0, 3)]
    assert [path.read_bytes() for path in pictures[0]] == [path.read_bytes() for path in pictures[1]] != []


def test_training_and_validation_share_the_limit_of_a_run(tiny_model: Any, tmp_path: Path) -> None:
    """Each alone would have eight on two cores."""
    train = {"num_env_groups": 6, "group_size": 4, "max_env_num_per_worker": 1}
    val = {"num_env_groups": 8, "max_env_num_per_worker": 1}

    def workers(split: str, started: tuple[str, ...] = (), eval_steps: int = 1, cores: int = 2) -> int:
        changes = {"val_env_manager": val, "eval_steps": eval_steps}
        config = config_of(tiny_model, tmp_path, "worker_envs:HomeEnv", train, **changes)
        return shared_workers(config, split, started, cores)["Letters"]

    assert (workers("train"), workers("val", started=("train",))) == (6, 2)
    assert workers("val") == 8, "an evaluation plays nothing else"
    assert workers("train", eval_steps=0) == 8
    assert (workers("train", cores=8), workers("val", started=("train",), cores=8)) == (24, 8)


def test_a_run_outlives_the_end_of_a_worker(
    tiny_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env_config = {"once": str(tmp_path / "ended")}
    config = config_of(tiny_model, tmp_path, "worker_envs:EndingEnv", WORKERS, env_config=env_config)
    with caplog.at_level(logging.WARNING, logger="turnwise"):
        folder = run_small(config).folder
    assert "SIGABRT" in caplog.text and "started again" in caplog.text
    assert len(measured(folder)) == 2 and all(row["status"] == "finished" for row in played(folder))


def test_a_class_that_ends_its_worker_at_each_step_ends_the_run(tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(EnvWorkersDeadError, match=r"EndingEnv \(custom_envs\.Letters\).*SIGABRT"):
        run_small(config_of(tiny_model, tmp_path, "worker_envs:EndingEnv", WORKERS))
