"""Turns that an agent samples at temperatures of their own, and what the trainer makes of their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import measured, played, run_small, small_config, training

from turnwise.config import AgenticConfig
from turnwise.pipelines.agentic import AgenticPipeline

PADDED = {"model_args": {"attn_implementation": "sdpa"}}


@pytest.fixture
def make_config(tiny_model: Path, tmp_path: Path) -> Any:
    rows = [{"prompt": word} for word in ("Left", "Right", "Up", "Down")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(model: Any = None, cut: Any = None, **changes: Any) -> AgenticConfig:
        own = {
            "max_steps": 1,
            "save_steps": 0,
            "actor_infer": {"generating_args": {"max_new_tokens": 6, "temperature": 0.7, **(cut or {})}},
            "actor_train": training(batch_size=8) | (model or {}),
            "custom_envs": {},
            "data": {
                "train_files": str(tmp_path / "train.jsonl"),
                "reward": "toy_rewards:length",
                "default_agent": "toy_rewards:AlternatesTemperatures",
            },
        }
        return small_config(tiny_model, tmp_path / "runs", **own | changes)

    return make


def of_step(pipeline: AgenticPipeline) -> dict[str, float]:
    return next(row for row in measured(pipeline.folder) if "actor/train_infer_diff_token_mean" in row)


@pytest.mark.parametrize(
    ("model", "cut"), [({}, {"top_k": 20, "top_p": 0.9}), (PADDED, {})], ids=["packed, cut", "padded"]
)
def test_sampler_and_trainer_agree_about_each_token_at_its_own_temperature(make_config, model, cut) -> None:
    changes = {"add_token_level_kl": True, "init_kl_coef": 0.1} if cut else {}
    pipeline = run_small(make_config(model, cut, **changes))
    turns = [turn for row in played(pipeline.folder) for turn in row["turns"]]
    assert [turn["sampling"]["temperature"] for turn in turns] == [0.7, 1.3] * (len(turns) // 2)
    step = of_step(pipeline)
    assert (
        step["actor/train_infer_diff_token_mean"] <= 1e-6 and step["actor/train_infer_diff_token_max"] <= 1e-4
    )
    assert step["actor/ratio_mean"] == step["actor/ratio_max"] == 1.0, "samples are fresh"
    assert step["actor/train_infer_ratio_token_mean"] == pytest.approx(1.0, abs=1e-6)
    assert (step["batch/actor_train/train/merged"] > 0) == (model != PADDED), (
        "padded batches have no common prefixes"
    )
    if cut:
        assert step["critic/kl"] == pytest.approx(0.0, abs=1e-6), "policy and reference are the same weights"


def test_a_file_of_rollouts_says_the_temperatures(make_config, tmp_path: Path) -> None:
    """One that doesn't is taken for sampled at the config's: then half of the tokens don't fit."""
    config = make_config()
    file = run_small(config).folder.rollouts
    assert of_step(run_small(config, rollouts=file))["actor/train_infer_diff_token_mean"] <= 1e-6
    silent = tmp_path / "silent.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for turn in (turn for row in rows for turn in row["turns"]):
        del turn["sampling"]
    silent.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert of_step(run_small(config, rollouts=silent))["actor/train_infer_diff_token_mean"] > 0.01
