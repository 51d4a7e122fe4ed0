"""The rows, demonstrations and reward of examples/tool_choice."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[3] / "examples" / "tool_choice" / "choice.py"))


def test_half_of_the_rows_need_no_call_and_no_product_comes_twice(script: dict[str, Any]) -> None:
    asked = script["questions"](seed=1)
    rows = [script["row"](question, index) for index, question in enumerate(asked[:200])]
    assert sum(row["needs_call"] for row in rows) == 100
    assert {row["data_source"] for row in rows} == {"sums", "products"}
    products = [question for question in asked if "*" in question]
    assert len(set(products)) == len(products) == script["NUM_ROWS"] // 2
    for row in rows[:20]:
        a, sign, b = row["prompt"][0]["content"].split()
        expected = int(a) * int(b) if sign == "*" else int(a) + int(b)
        assert row["reward_model"]["ground_truth"] == str(expected)


def test_only_a_call_that_is_not_needed_costs_something(script: dict[str, Any]) -> None:
    called = [{"role": "assistant", "content": "", "tool_calls": [{}]}, {"role": "tool", "content": "7"}]
    silent = [{"role": "assistant", "content": "#### 7"}]
    cost = script["needless_call"]([called, called, silent, silent], [False, True, False, True])
    assert cost == [-1.0, 0.0, 0.0, 0.0]


def test_demonstrations_call_for_sums_and_products_alike(script: dict[str, Any]) -> None:
    def share_called(question: str) -> float:
        shown = [script["demonstration"](question, random.Random(seed))["messages"] for seed in range(200)]
        return sum(len(messages) == 4 for messages in shown) / len(shown)

    assert share_called("3 + 4") == share_called("123 * 456") > script["SHARE_CALLED"] - 0.1


def test_a_sum_that_is_known_is_answered_without_a_call(script: dict[str, Any]) -> None:
    user, answer = script["known"]("3 + 4")["messages"]
    assert (user["content"], answer["content"]) == ("3 + 4", "#### 7")
