"""Runs that train graphs of LangGraph on a tiny model: the maths-expression agent, in its published form, and
`create_agent` over a row's tools. Runs in the environment of LangGraph."""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from pathlib import Path

import pytest
from langchain_core.utils.function_calling import convert_to_openai_tool

from turnwise.cli.main import main
from turnwise.errors import ConfigError
from turnwise.models.make import make_model
from turnwise.runtime.entry_points import load_class

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "recipe" / "langgraph_agent" / "example"
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SMALL = [
    "max_steps=1",
    "eval_steps=0",
    "rollout_batch_size=8",
    "train_env_manager.num_env_groups=2",
    "train_env_manager.group_size=4",
    "actor_train.training_args.per_device_train_batch_size=8",
    "actor_infer.generating_args.max_new_tokens=24",
]


def small_model(folder: Path, texts: list[str]) -> Path:
    return make_model("tiny", folder, texts, overrides=SIZES).folder


def rollouts(folder: Path) -> list[dict]:
    [file] = folder.glob("*/*/rollouts.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_maths_expression_agent_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    script = runpy.run_path(str(EXAMPLE / "create_dataset.py"), run_name="imported")
    loop = load_class(
        "recipe.langgraph_agent.example.math_expression:MathExpressionReactAgentLoop", "it", ConfigError
    )
    loop.init_class(None, None)
    assert convert_to_openai_tool(loop.tools[0]) == script["SCHEMA"]
    rows = tmp_path / "rows"
    script["main"](["--train_size", "16", "--test_size", "4", "--output_dir", str(rows)])
    rng = random.Random(0)
    texts = [json.dumps(script["demonstration"]((1, 2, 3), rng)) for _ in range(20)]
    model = small_model(tmp_path / "model", [json.dumps(script["SCHEMA"]) * 20, *texts])
    monkeypatch.chdir(ROOT)
    changes = [f"pretrain={model}", f"output_dir={tmp_path / 'runs'}", *SMALL]
    changes += [
        f"data.{name}_files={rows / file}.parquet" for name, file in (("train", "train"), ("val", "test"))
    ]
    assert main(["train", str(EXAMPLE / "grpo.yaml"), *changes]) == 0
    played = rollouts(tmp_path / "runs")
    assert len(played) == 8 and not any(episode["error"] for episode in played)
    assert {episode["task"]["agent"] for episode in played} == {"math_expression"}


def test_create_agent_trains_over_the_tools_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(ROOT / "examples" / "products" / "products.py"), run_name="imported")
    files = [tmp_path / "train.jsonl", tmp_path / "val.jsonl"]
    for file in files:
        script["write"](file, [script["row"](12, b, b, True) for b in range(8)])
    rng = random.Random(0)
    texts = [json.dumps(script["demonstration"](12, 34, rng, True)) for _ in range(20)]
    model = small_model(tmp_path / "model", [json.dumps(script["SCHEMA"]) * 20, *texts])
    monkeypatch.chdir(ROOT)
    changes = [f"pretrain={model}", f"output_dir={tmp_path / 'runs'}", *SMALL]
    changes += [f"data.train_files={files[0]}", f"data.val_files={files[1]}"]
    config = str(ROOT / "examples" / "langgraph" / "products.yaml")
    assert main(["train", config, *changes]) == 0
    played = rollouts(tmp_path / "runs")
    assert len(played) == 8 and not any(episode["error"] for episode in played)
    assert {episode["task"]["agent"] for episode in played} == {"react_agent"}


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    status = pytest.main([__file__, "--noconftest", "-q", "-p", "no:cacheprovider", *sys.argv[1:]])
    print(f"langgraph: trained runs ended with status {status}")
    raise SystemExit(status)
