"""examples/data_preprocess/gsm8k_tool_agent_loop.py: from the raw form to rows that are played with the
published tool."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from messages import says

from turnwise.config import AgenticConfig, parse_config
from turnwise.data.tables import read_tables
from turnwise.errors import DataError
from turnwise.examine.examined import examine

SCRIPT = runpy.run_path(
    str(Path(__file__).parents[3] / "examples" / "data_preprocess" / "gsm8k_tool_agent_loop.py"),
    run_name="imported",
)
RAW = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nIn all 48+24 = <<48+24=72>>1,072\n#### 1,072",
}


def test_raw_rows_become_rows_of_the_published_schema(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(RAW) + "\n")
    SCRIPT["main"](["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    [row] = read_tables([str(tmp_path / "out" / "train.parquet")], "data.train_files")
    assert (row.columns["data_source"], row.columns["agent_name"]) == ("openai/gsm8k", "tool_agent")
    assert [message["role"] for message in row.columns["prompt"]] == ["system", "user"]
    assert row.columns["reward_model"] == {"style": "rule", "ground_truth": "1072"}
    assert row.columns["ability"] == "math"
    assert row.columns["extra_info"]["tools_kwargs"] == {
        "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1072"}}
    }
    (tmp_path / "tools.yaml").write_text(
        "tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {type: native}}]"
    )
    data = {"train_files": [str(tmp_path / "out" / "train.parquet")], "reward": "gsm8k"}
    values = {
        "pretrain": "m",
        "data": data,
        "agent": {"tool_config_path": str(tmp_path / "tools.yaml")},
        "eval_steps": 0,
    }
    config, _ = parse_config(values, AgenticConfig)
    assert (
        examine(config).tools.names == ["calc_gsm8k_reward"] and len(examine(config).rows("train").rows) == 1
    )


def test_an_answer_without_its_mark_is_refused() -> None:
    with pytest.raises(DataError, match=says("row 3", "'#### n'")):
        SCRIPT["row_of"](RAW | {"answer": "72"}, "train", 2)
