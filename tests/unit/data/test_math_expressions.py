"""recipe/langgraph_agent/example: rows are right, drawn by seed, and none that is tested is trained on."""

from __future__ import annotations

import random
import runpy
from pathlib import Path

import pytest
from pyarrow import parquet

from turnwise.config import AgenticConfig, load_config
from turnwise.config.read.agent_files import read_loop_file

EXAMPLE = Path(__file__).parents[3] / "recipe" / "langgraph_agent" / "example"
SCRIPT = runpy.run_path(str(EXAMPLE / "create_dataset.py"), run_name="imported")


def write(folder: Path, *arguments: str) -> dict[str, list[dict]]:
    SCRIPT["main"](["--train_size", "300", "--test_size", "40", "--output_dir", str(folder), *arguments])
    return {name: parquet.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "test")}


def test_rows_have_the_right_answer_and_are_drawn_by_seed(tmp_path: Path) -> None:
    rows = write(tmp_path / "a")
    assert rows == write(tmp_path / "b") != write(tmp_path / "c", "--seed", "1")
    assert (len(rows["train"]), len(rows["test"])) == (300, 40)
    expressions = {name: {row["extra_info"]["expression"] for row in rows[name]} for name in rows}
    assert expressions["train"].isdisjoint(expressions["test"])
    for row in rows["test"]:
        numbers = list(map(int, row["extra_info"]["expression"].split(" @ ")))
        total = numbers[0]
        for number in numbers[1:]:
            total = 3 * total - 2 * number
        assert row["reward_model"]["ground_truth"] == str(total)
        assert row["extra_info"]["expected_tool_calls"] == len(numbers) - 1
        assert row["prompt"][0]["content"].endswith(f"Compute {row['extra_info']['expression']}")
        assert row["agent_name"] == "math_expression"


def test_demonstrations_call_the_tool_step_by_step() -> None:
    rng = random.Random(0)
    finals = [SCRIPT["demonstration"]((1, 2, 3), rng)["messages"] for _ in range(200)]
    assert all(len(messages) == 6 for messages in finals)
    share_right = sum(messages[-1]["content"] == "\\boxed{-9}" for messages in finals) / 200
    assert 0.3 < share_right < 0.5


def test_no_expression_that_is_tested_is_demonstrated() -> None:
    _, tested = SCRIPT["split"](42, 500)
    rng = random.Random(0)
    drawn = {SCRIPT["drawn_numbers"](rng, set(tested)) for _ in range(2000)}
    assert drawn.isdisjoint(tested)
    assert {len(numbers) for numbers in drawn} == set(SCRIPT["LENGTHS"])


def test_too_many_tests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        write(tmp_path, "--test_size", "800")


@pytest.mark.parametrize("name", ["grpo.yaml", "qwen2.5_3b.yaml"])
def test_its_runs_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parents[2])
    config, _ = load_config(EXAMPLE / name, [], AgenticConfig)
    loops = read_loop_file(config.agent.agent_config_path or "")
    assert loops["math_expression"].target.endswith(":MathExpressionReactAgentLoop")
    assert config.data.train_files == ["data/math_expression_tool/train.parquet"]
