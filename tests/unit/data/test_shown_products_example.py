"""The rows of examples/smollm whose prompts show calls of a tool."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "smollm" / "products.py"))


def test_no_product_is_held_out_that_is_trained_on_or_shown() -> None:
    train, held_out = SCRIPT["rows"](1)
    questions = [[row["prompt"][-1]["content"] for row in rows] for rows in (train, held_out)]
    shown = {SCRIPT["question"](*pair)["content"] for pair in SCRIPT["SHOWN"]}
    assert [len(set(each)) for each in questions] == [500, 40]
    assert not {*questions[0], *shown} & {*questions[1]}


def test_a_prompt_shows_two_calls_and_asks() -> None:
    row = SCRIPT["row"](19, 56)
    roles = [message["role"] for message in row["prompt"]]
    assert roles == ["user", "assistant", "tool", "assistant"] * 2 + ["user"]
    [call] = row["prompt"][1]["tool_calls"]
    assert call["function"]["arguments"] == {"expression": "12 * 34"}
    assert row["prompt"][2]["tool_call_id"] == call["id"] and row["prompt"][2]["content"] == "408"
    assert row["answer"] == "1064"
