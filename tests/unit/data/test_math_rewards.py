"""Answers read off texts, the formulas of the rewards, and problems in GSM8K's format."""

from __future__ import annotations

import re

import pytest
from messages import says

from turnwise.data.answers import answer_of, is_correct
from turnwise.data.gsm8k import generate_problems, rl_row, sft_row
from turnwise.data.math_rewards import FORMULAS, accuracy, combined, format_reward, length_penalty, step
from turnwise.data.reward_functions import FunctionReward
from turnwise.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Final Answer: 3 + 4 = 7", 7),
        ("Therefore 3. Wait. Therefore, the answer is 12.", 12),
        ("The answer is 7 apples in 3 days", 7),
        ("#### 1,234.50", 1234.5),
        ("Final Answer: -$5", -5),
        ("it costs €1,000,000 in all", 1_000_000),
        (r"\boxed{\frac{1}{2}}", 0.5),
        (r"so \boxed{1{,}000}.", 1000),
        ("Final Answer: 3/4", 0.75),
        ("答案是 12", 12),
        ("Final Answer:\n**18**", 18),
        ("we get 3, then 10 - 3 = 7", 7),
    ],
)
def test_the_last_stated_answer_counts(text, value):
    assert answer_of(text).value == pytest.approx(value)


def test_equal_answers():
    assert is_correct("Final Answer: 0.33334", "0.33333") and not is_correct("Final Answer: 0.334", "0.333")
    assert is_correct("The answer is 50%", "50") and is_correct("The answer is 50%", "0.5")
    assert not is_correct("The answer is 0.5%", "50%")
    assert is_correct("Final Answer: Paris.", "paris") and not is_correct("Final Answer: 1", "x+1")
    assert answer_of("Final Answer: " + "9" * 400) is None, "no float is as large, and JSON has no infinity"
    assert is_correct("#### 7", "first <<3+4=7>>7\n#### 7") and not is_correct("no idea", "7")


def test_formulas_as_published():
    right, wrong = "a = 1\nb = 2\nFinal Answer: 7", "\n\na = 1\nb = 2\nc = 3\n#### 8"
    truth = {"ground_truth": ["7", "7"]}
    assert (
        accuracy([right, wrong], **truth)
        == accuracy([right, wrong], answer=["#### 7", "#### 7"])
        == [1.0, 0.0]
    )
    penalties = [0.001 * (len(text) - 10) for text in (right, wrong)]
    given = length_penalty([right, wrong], **truth, max_length=10, penalty_weight=0.001)
    assert given == pytest.approx([1 - penalties[0], -penalties[1]])
    assert step([right, wrong], **truth) == pytest.approx([1.2, 0.3])
    assert format_reward([right, "Final Answer: 7\nor not"]) == [1.0, 0.0]
    parts = combined([right], ["7"], weights={"accuracy": 2.0, "step": 0.5, "format": 1.0}, step_bonus=1.0)
    assert parts == pytest.approx([2 + 0.5 * 3 + 1])


def test_the_safe_parameters():
    right, wrong = "a\nb\nc\n#### 7", "a\nb\nc\n#### 8"
    truth = {"ground_truth": ["7", "7"]}
    assert step([right, wrong], **truth, max_steps=2, only_if_correct=True) == pytest.approx([1.2, 0.0])
    assert length_penalty([right, wrong], **truth, max_length=0, penalty_weight=1, floor=-0.5) == [-0.5, -0.5]


def test_length_in_tokens(tiny_model):
    given = {"ground_truth": ["7"], "max_length": 0, "penalty_weight": 1.0, "length_unit": "tokens"}
    [reward] = length_penalty(["#### 7"], **given, tokenizer=str(tiny_model))
    assert reward == int(reward) and -5 <= reward < 1
    with pytest.raises(ConfigError, match="tokenizer"):
        length_penalty(["#### 7"], **given)


def test_truths_are_needed():
    with pytest.raises(ConfigError, match="ground_truth or answer"):
        accuracy(["7"])
    with pytest.raises(ConfigError, match=says("'steps'", "'step'")):
        combined(["7"], ["7"], weights={"steps": 1.0})
    assert set(FORMULAS) == {"accuracy", "length_penalty", "step", "format", "combined"}


def test_generated_problems_are_right_and_test_operands_are_held_out():
    train, test = generate_problems(300), generate_problems(60, "test")
    assert generate_problems(5) == train[:5] and len({row["question"] for row in train}) == 300
    operands = []
    for rows in (train, test):
        operands.append([])
        for row in rows:
            steps = re.findall(r"<<(\d+)([+-])(\d+)=(\d+)>>", row["answer"])
            assert all(int(a) + (int(b) if o == "+" else -int(b)) == int(c) for a, o, b, c in steps)
            assert row["answer"].endswith(f"#### {steps[-1][3]}")
            operands[-1].append([frozenset((a, b)) for a, _, b, _ in steps])
    assert not {pair for of_row in operands[0] for pair in of_row} & {of_row[0] for of_row in operands[1]}
    assert "-" not in str(generate_problems(20, operations="+"))
    assert {row["answer"].count("<<") for row in train} == {1, 2, 3}
    with pytest.raises(DataError, match="ask for fewer"):
        generate_problems(1000, steps=(1,), largest=2)


def test_demonstrations_and_tasks_have_one_prompt():
    [row] = generate_problems(1)
    shown, asked = sft_row(row, ""), rl_row(row, "")
    assert (
        shown["messages"][0]["content"] == asked["prompt"]
        and asked["ground_truth"] == row["answer"].split()[-1]
    )
    assert is_correct(shown["messages"][1]["content"], asked["ground_truth"])
    for make in (sft_row, rl_row):
        with pytest.raises(DataError, match=says("line 3", "columns text")):
            make({"text": "a"}, "line 3")


def test_problems_have_the_operations_asked_for():
    for operations in "+-":
        questions = [
            problem["question"] for problem in generate_problems(20, steps=(3,), operations=operations)
        ]
        assert all(
            (" finds " in question, " gives " in question) == (operations == "+", operations == "-")
            for question in questions
        )


def test_who_asks_for_the_parameters_of_combined_gets_those_of_its_parts():
    reward = FunctionReward("combined", combined, str, "prompt", {"penalty_weight": 0.5})
    assert not reward.columns.takes_all and {"ground_truth", "answer", "step_bonus"} < set(
        reward.columns.optional
    )
    with pytest.raises(ConfigError, match=says("args.penalty_wieght", "penalty_weight")):
        FunctionReward("combined", combined, str, "prompt", {"penalty_wieght": 0.5})


@pytest.mark.parametrize(
    ("completion", "truth"),
    [
        (r"\boxed{2}", r"\sqrt{2}"),
        ("Final Answer: 2", r"2\pi"),
        (r"\boxed{3}", "3x"),
        (r"\boxed{(1, 3)}", "(1, 2)"),
        ("#### 1", "1,2"),
        (r"\boxed{3\sqrt{5}}", r"3\sqrt{2}"),
        (r"\boxed{3}", r"\frac{\sqrt{3}}{2}"),
        ("#### 1", 1e-05),
    ],
)
def test_a_formula_is_no_number_and_only_equals_itself(completion, truth):
    assert not is_correct(completion, truth) and is_correct(rf"\boxed{{{truth}}}", truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5", r"5\text{ cm}"),
        ("5", "5cm"),
        ("5 cm", "5"),
        ("5", "$5$"),
        ("5", "$5."),
        ("-5", "$-5$"),
        ("50%", r"50\%"),
        ("1000", "1{,}000"),
        ("-0.5", r"-\frac{1}{2}"),
        ("0.5", r"$\frac{1}{2}$"),
        ("5", "5 dollars per day."),
        ("5", "**5**"),
        ("5", "(5)"),
        ("1200", 1.2e3),
        ("0.00001", 1e-05),
    ],
)
def test_a_number_is_one_with_its_unit_and_signs(answer, truth):
    assert is_correct(f"#### {answer}", truth) and not is_correct("#### 77", truth)
