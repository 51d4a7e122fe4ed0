"""The rows and the reward of examples/smollm."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "smollm" / "one_digit.py"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7", 1.0),
        ("7.", 1.0),
        ("It is **7**!", 1.0),
        ("7, since 3 + 4", 0.0),
        ("17", 0.0),
        ("-7", 0.0),
        ("2.7", 0.0),
        ("7.0", 0.0),
        ("seven", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_whole_number_counts(text: str, expected: float) -> None:
    assert SCRIPT["correct"]([text], ["7"]) == [expected]


@pytest.mark.parametrize("seed", [0, 42])
def test_no_sum_is_held_out_in_one_order_only(seed: int) -> None:
    train, held_out = ({row["prompt"] for row in rows} for rows in SCRIPT["rows"](seed))
    assert (len(train), len(held_out)) == (80, 20)
    assert len(train | held_out) == 100
    both = {
        SCRIPT["row"](b, a)["prompt"]
        for a in range(10)
        for b in range(10)
        if SCRIPT["row"](a, b)["prompt"] in held_out
    }
    assert both == held_out


def test_terms_may_be_larger() -> None:
    train, held_out = SCRIPT["rows"](1, 99)
    assert len(train) == 100 * 100 - 20 and len(held_out) == 20
    assert {"prompt": "What is 99 + 99? Answer with the number only.", "answer": "198"} in train
