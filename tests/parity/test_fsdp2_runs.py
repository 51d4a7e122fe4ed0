"""Whole runs with sharded models on two ranks play and learn what runs with whole models do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import measured, played, run_small, small_config, training

from turnwise.config import AgenticConfig
from turnwise.lifecycle.run_folder import RunFolder

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(not os.environ.get("TURNWISE_FULL"), reason="takes minutes; make test-full runs it"),
]

SAME = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor_train/grad_norm", "critic/grad_norm")


@pytest.fixture
def make_config(tiny_model: Path, tmp_path: Path) -> Callable[..., AgenticConfig]:
    def make(engine: str, model: dict[str, Any], **changes: Any) -> AgenticConfig:
        trained = {
            **training(5e-3, 4),
            "device_mapping": [0, 1],
            "strategy_args": {"strategy_name": f"{engine}_train"},
        }
        return small_config(
            tiny_model,
            tmp_path / "runs",
            exp_name=engine,
            num_gpus_per_node=2,
            actor_train={**trained, "model_args": model},
            critic=trained,
            reference={"strategy_args": {"strategy_name": f"{engine}_infer"}},
            **{"max_steps": 3, **changes},
        )

    return make


def tokens(folder: RunFolder) -> list[list[list[int]]]:
    return [[turn["response_ids"] for turn in row["turns"]] for row in played(folder)]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({}, {"use_kl_loss": True}),
        ({"lora_rank": 4, "disable_gradient_checkpointing": False}, {"use_kl_loss": True}),
        ({}, {"adv_estimator": "gae"}),
    ],
    ids=["full_with_reference", "lora_without_adapter", "critic"],
)
def test_a_run_with_shards_is_one_with_whole_models(
    make_config: Callable[..., AgenticConfig], model: dict[str, Any], changes: dict[str, Any]
) -> None:
    """The same rollouts, losses and gradient norms; the servers get what is trained (the parity gate)."""
    folders = [run_small(make_config(engine, model, **changes)).folder for engine in ("torch", "fsdp2")]
    assert tokens(folders[0]) == tokens(folders[1])
    for whole, sharded in zip(*map(measured, folders), strict=True):
        assert whole.keys() == sharded.keys()
        for name in SAME:
            if name in whole:
                np.testing.assert_allclose(sharded[name], whole[name], rtol=1e-4, atol=1e-6)
        assert sharded["actor/skipped_steps"] == 0


def test_a_sharded_run_goes_on_from_its_checkpoint(make_config: Callable[..., AgenticConfig]) -> None:
    """Two steps and one more are three."""
    whole = run_small(make_config("fsdp2", {})).folder
    first = run_small(make_config("fsdp2", {}, max_steps=2)).folder
    resumed = make_config("fsdp2", {}, resume_from_checkpoint=str(first.path / "checkpoints/checkpoint-2"))
    again = run_small(resumed).folder
    name = "checkpoints/checkpoint-3/model.safetensors"
    expected = load_file(whole.path / name)
    for tensor, value in load_file(again.path / name).items():
        np.testing.assert_array_equal(value, expected[tensor])
