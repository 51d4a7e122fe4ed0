"""The scripts that introduce the second published system: they reach `turnwise train`, and their runs train
on a laptop."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
from pathlib import Path

import forked
import pytest

from turnwise.config import AgenticConfig, describe, load_config
from turnwise.models.make import make_model

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS = {
    "plain": EXAMPLES / "grpo_trainer" / "run_qwen2-7b_seq_balance.sh",
    "tools": EXAMPLES / "sglang_multiturn" / "run_qwen2.5-3b_gsm8k_tool_agent_mlflow.sh",
}
RAW = {"question": "Two cats and three dogs: how many pets?", "answer": "2+3 = <<2+3=5>>5\n#### 5"}


def arguments_of(script: Path, folder: Path, *overrides: str, **variables: str) -> list[str]:
    """What the script calls `turnwise` with."""
    stub = folder / "bin" / "turnwise"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}"} | variables
    done = subprocess.run(
        ["bash", script, *overrides], capture_output=True, text=True, cwd=folder, env=environment, check=True
    )
    return done.stdout.splitlines()


def laptop_overrides(config: Path) -> list[str]:
    """The overrides that the first lines of the config name."""
    lines = config.read_text(encoding="utf-8").splitlines()
    comment = "\n".join(line for line in lines if line.startswith("#"))
    return [text for text in re.findall(r"[\w.]+=\S+", comment) if not text.startswith("pretrain=")]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_names_its_engine_by_rollout_name(script: Path, engine: str, tmp_path: Path) -> None:
    chosen = {} if engine == "sglang" else {"rollout_name": engine}
    verb, path, *overrides = arguments_of(script, tmp_path, "max_steps=3", **chosen)
    config, _ = load_config(Path(path), overrides, AgenticConfig)
    assert (verb, config.actor_infer.strategy_args.strategy_name, config.max_steps) == ("train", engine, 3)
    assert config.data.train_files == ["~/data/gsm8k/train.parquet"]
    assert ("tp_size" in config.actor_infer.strategy_args.strategy_config) == (engine == "sglang")


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_its_run_trains_on_a_laptop(script: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f"{json.dumps(RAW)}\n" * 12)
    convert = runpy.run_path(
        str(EXAMPLES / "data_preprocess" / "gsm8k_tool_agent_loop.py"), run_name="imported"
    )
    convert["main"](["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "data")])
    verb, path, *overrides = arguments_of(script, tmp_path)
    # MLflow isn't installed here.
    overrides = [override for override in overrides if ".rollout.trace." not in override]
    overrides += [*laptop_overrides(Path(path)), "track_with=[stdout]"]
    assert describe(load_config(Path(path), overrides, AgenticConfig)[0]).missing == []
    prompts = (tmp_path / "data" / "train.parquet").read_bytes().decode(errors="ignore")
    model = make_model("tiny", tmp_path / "model", [prompts * 20], overrides={"num_hidden_layers": 1}).folder
    files = [
        f"data.{split}_files={tmp_path}/data/{name}.parquet"
        for split, name in (("train", "train"), ("val", "test"))
    ]
    small = [
        f"pretrain={model}",
        "actor_infer.generating_args.max_new_tokens=4",
        "max_steps=1",
        "eval_steps=0",
        "save_steps=0",
    ]
    done = forked.run([verb, path, *overrides, *files, *small], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stdout
    [saved] = tmp_path.glob("output/*/*/checkpoints/checkpoint-1")
    assert (saved / "model.safetensors").is_file()
