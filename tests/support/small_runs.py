"""Sets up runs of a few steps over a toy environment whose answers are a few letters, for tests of whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

from turnwise.build.agentic import build_agentic
from turnwise.build.run import start_run
from turnwise.config import AgenticConfig, parse_config
from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.pipelines.run_folder import RunFolder
from turnwise.tracking.jsonl import read_metrics

TIMES = ("time/", "system/tps")
"""Prefixes of metrics that differ between two otherwise equal runs."""
LETTERS = {
    "env_type": "toy_envs:LettersEnv",
    "max_steps": 2,
    "max_tokens_per_step": 4,
    "agent_template": "{observation}",
    "action_pattern": None,
}
_SMALL = {
    "exp_name": "letters",
    "save_steps": 1,
    "max_ckpt_to_keep": 0,
    "rollout_batch_size": 8,
    "sequence_length": 256,
    "track_with": [],
    "train_env_manager": {"num_env_groups": 2, "group_size": 4},
    "custom_envs": {"Letters": LETTERS},
}


def small_config(model: object, output_dir: object, /, **changes: Any) -> AgenticConfig:
    """Steps of two groups of four, checkpoints of every step, and whatever is changed of that."""
    return parse_config({"pretrain": str(model), "output_dir": str(output_dir), **_SMALL, **changes}, AgenticConfig)[0]


def run_small(
    config: AgenticConfig, change: Callable[[AgenticPipeline], object] = lambda pipeline: None, **options: Any
) -> AgenticPipeline:
    """The pipeline after its run, before which `change` was called with it; it is closed."""
    folder = start_run(config)
    try:
        pipeline = build_agentic(config, folder, **options)
    except BaseException:
        folder.discard()
        raise
    with closing(pipeline):
        change(pipeline)
        pipeline.run()
    return pipeline


def training(learning_rate: float = 1e-3, batch_size: int = 4, **others: Any) -> dict[str, Any]:
    """A role's `training_args`."""
    settings = {"learning_rate": learning_rate, "per_device_train_batch_size": batch_size, **others}
    return {"training_args": settings}


def measured(folder: RunFolder) -> list[dict[str, float]]:
    """The metrics of each step, without times."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(folder.metrics)]


def played(folder: RunFolder) -> list[dict[str, Any]]:
    """The trajectories of a run without how long they took."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in folder.rollouts.read_text().splitlines()]
    for turn in (turn for row in rows for turn in row["turns"]):
        del turn["generate_s"], turn["step_s"]
    return rows
