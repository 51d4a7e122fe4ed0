"""Sets up runs of a few steps over a toy environment whose answers are a few letters, for tests of whole
runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.config import AgenticConfig, SFTConfig, parse_config
from turnwise.examine.examined import examine
from turnwise.lifecycle.run_folder import RunFolder
from turnwise.pipelines.agentic import AgenticPipeline
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
SMALL = {
    "exp_name": "letters",
    "save_steps": 1,
    "max_ckpt_to_keep": 0,
    "rollout_batch_size": 8,
    "sequence_length": 256,
    "track_with": [],
    "train_env_manager": {"num_env_groups": 2, "group_size": 4},
    "custom_envs": {"Letters": LETTERS},
}


LAUNCHER = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]
LAUNCHER += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
"""Arguments of Python that start what follows them in two processes."""


def small_yaml(model: object, **changes: Any) -> str:
    """The text of a config file of `small_config`; its runs go to the folder `runs` of the working
    directory."""
    return yaml.safe_dump({"pretrain": str(model), "output_dir": "runs", **SMALL, **changes})


def small_config(model: object, output_dir: object, /, **changes: Any) -> AgenticConfig:
    """Steps of two groups of four, checkpoints of every step, and whatever is changed of that."""
    return parse_config(
        {"pretrain": str(model), "output_dir": str(output_dir), **SMALL, **changes}, AgenticConfig
    )[0]


@contextmanager
def built(config: AgenticConfig, **options: Any) -> Iterator[AgenticPipeline]:
    """The pipeline of a config, before its run; it is closed at the end."""
    folder = start_run(config)
    try:
        pipeline = build_agentic(examine(config), folder, **options)
    except BaseException:
        folder.discard()
        raise
    with closing(pipeline):
        yield pipeline


def run_small(
    config: AgenticConfig, change: Callable[[AgenticPipeline], object] = lambda pipeline: None, **options: Any
) -> AgenticPipeline:
    """The pipeline after its run, before which `change` was called with it; it is closed."""
    with built(config, **options) as pipeline:
        change(pipeline)
        pipeline.run()
    return pipeline


def folder_of_run(config: AgenticConfig, **options: Any) -> RunFolder:
    """The folder that a run leaves."""
    return run_small(config, **options).folder


def broken_model(folder: Path) -> Path:
    """A folder that looks like one of a model, and can't be loaded."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def training(learning_rate: float = 1e-3, batch_size: int = 4, **others: Any) -> dict[str, Any]:
    """A role's `training_args`."""
    settings = {"learning_rate": learning_rate, "per_device_train_batch_size": batch_size, **others}
    return {"training_args": settings}


def write_demonstrations(path: Path, num_rows: int, answer: str = "<answer>Right</answer>") -> str:
    """Writes rows of one conversation each; returns the path."""
    messages = [{"role": "user", "content": "P _ G"}, {"role": "assistant", "content": answer}]
    path.write_text((json.dumps({"messages": messages}) + "\n") * num_rows)
    return str(path)


def sft_config(model: object, folder: Path, /, **changes: Any) -> SFTConfig:
    """Fine-tuning on forty equal demonstrations, eight a step, and whatever is changed of that."""
    values = {
        "pretrain": str(model),
        "output_dir": str(folder / "runs"),
        "train_files": [write_demonstrations(folder / "train.jsonl", 40)],
        "sequence_length": 64,
        "track_with": [],
        **training(1e-2, 8),
    }
    return parse_config(values | changes, SFTConfig)[0]


def assert_same_weights(first: Path, second: Path, name: str = "model.safetensors") -> None:
    """Two checkpoints are equal, bit by bit."""
    ours, theirs = load_file(first / name), load_file(second / name)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def measured(folder: RunFolder) -> list[dict[str, float]]:
    """The metrics of each step, without times."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(folder.metrics)]


def played(folder: RunFolder) -> list[dict[str, Any]]:
    """The trajectories of a run without how long they took."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in folder.rollouts.read_text().splitlines()]
    for turn in (turn for row in rows for turn in row["turns"]):
        del turn["generate_s"], turn["step_s"]
    return rows
