"""What counts as the right answer: a table of true answers and completions, and the readers' cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from growth import assert_linear

from turnwise.data.answers import answer_key, answer_of, is_correct, stated_answer
from turnwise.data.math_rewards import accuracy, combined, length_penalty, num_steps, step
from turnwise.data.rewards import exact_match, gsm8k

TABLE = yaml.safe_load((Path(__file__).parents[2] / "data" / "math_answers.yaml").read_text(encoding="utf-8"))
RIGHT, WRONG = (
    [
        (truth, answer)
        for groups in TABLE.values()
        for group in groups.values()
        for truth, answer in group[verdict]
    ]
    for verdict in ("right", "wrong")
)


def test_no_wrong_answer_is_paid_and_hardly_a_right_one_missed():
    assert len(RIGHT) + len(WRONG) >= 150 and len(WRONG) >= 75
    assert [pair for pair in WRONG if is_correct(pair[1], pair[0])] == []
    missed = [pair for pair in RIGHT if not is_correct(pair[1], pair[0])]
    assert len(missed) <= 0.05 * len(RIGHT), missed


@pytest.mark.parametrize(
    "written", ["72", "72.0", "$72.00", "+72", "072", "**72**", r"\boxed{72}", "72.", "$72$", "7.2e1"]
)
@pytest.mark.parametrize("truth", ["72", 72, 72.0, "72.0"])
def test_every_reward_reads_one_number_alike(written, truth):
    completion = f"#### {written}"
    given = {"completions": [completion, "#### 73"], "ground_truth": [truth, truth]}
    assert gsm8k(**given) == accuracy(**given) == [1.0, 0.0]
    assert step(**given, step_bonus=0.0) == length_penalty(**given) == [1.0, 0.0]
    assert combined(**given, weights={"accuracy": 1.0}) == [1.0, 0.0]


def test_gsm8k_wants_its_own_form_and_one_number():
    assert gsm8k(["72", "the answer is 72", "#### 72 or 73", "#### 7.2"], ["72"] * 4) == [0.0] * 4
    assert gsm8k(["#### .", "#### ", "####"], [".", "", "x"]) == [0.0] * 3
    assert (
        gsm8k(["#### 1,000.0 dollars", "#### 3\n#### 4", "#### 4\n#### Note\nwell"], [1000, "4", "4"])
        == [1.0] * 3
    )


def test_exact_match_compares_numbers_only_with_a_column_of_numbers():
    assert exact_match(["02134", "2134", "2134.0"], ["02134"] * 3) == [1.0, 0.0, 0.0]
    assert exact_match(["72", "72.0", " 1,000 ", "0.5"], [72.0, 72, 1000, 0.5]) == [1.0] * 4
    assert exact_match(["72 apples", "72%", "73", "", "0.50001"], [72, 72, 72, 72, 0.5]) == [0.0] * 5
    assert exact_match(["nan", "True"], [float("nan"), True]) == [0.0, 1.0]


def test_an_answer_that_was_cut_off_in_its_box_states_nothing():
    assert stated_answer(r"So it is \boxed{4") is None
    assert not is_correct(r"So it is \boxed{4", "4") and not is_correct(r"\boxed{\frac{1}{4}", "4")
    assert is_correct(r"\boxed{4} or rather \boxed{", "4"), "a box before it stands"


def test_a_sentence_after_the_box_does_not_override_it():
    assert stated_answer(r"\boxed{5}. The answer is clear.") == "5"
    assert stated_answer("\\boxed{5}\nFinal Answer: I am quite sure.") == "5"
    assert stated_answer("\\boxed{5}\n#### 6") == "6", "another answer does"
    assert stated_answer(r"\boxed{\frac{1}{\sqrt{2}}} and \boxed{") == r"\frac{1}{\sqrt{2}}"
    assert stated_answer("Use \\boxed{} for it. The answer is 5") == "5"


def test_equal_answers_are_counted_together():
    assert answer_key("Final Answer: 72.0") == answer_key("#### 72") == 72
    assert (
        answer_key(r"\boxed{(1, 2)}")
        == answer_key("Final Answer: (1,2)")
        != answer_key("Final Answer: (2,1)")
    )
    assert answer_key("no idea") == ""


LONG = [
    *(
        "1",
        "9,999 ",
        " ",
        "\n",
        "therefore is is ",
        "the answer is ",
        "#### ",
        "####\n",
        "answer : ",
        "answer",
        "{",
        "{}",
        "\\",
    ),
    *(
        r"\boxed{",
        r"\boxed{1}",
        r"\boxed{1} or ",
        r"\{",
        r"\frac{",
        r"\frac1",
        r"\sqrt",
        "$",
        "$1$ ",
        "*",
        "**1** ",
        "_",
        "^",
    ),
    *(
        "-",
        "(",
        "()",
        "[1,",
        "=",
        "1=",
        "1/",
        "1 or ",
        "1 and a ",
        "a ",
        "a b/c. ",
        "<<1+1=2>>",
        "<answer>",
        "5 in ",
        "答案",
        "½",
    ),
    "Final Answer: 5. ",
    "**answer**\n",
]
SHORT = [*LONG, "sin(", "a(", "x+", "±", "±1 or ", "~", '"', "10^", "5 square ", "miles per "]
"""Forms that are read in short answers only."""


def test_any_text_is_read_in_linear_time():
    for unit in LONG:

        def read(size: int, unit: str = unit) -> None:
            text = unit * (size // len(unit.encode()))
            is_correct(text, "72")
            num_steps(text)
            gsm8k([text], ["72"])

        assert_linear(read, 120_000, unit)


def test_an_answer_of_any_form_is_read_at_once():
    for unit in SHORT:

        def read(size: int, unit: str = unit) -> None:
            short = unit * (size // len(unit))
            for text in (f"Final Answer: {short}", f"\\boxed{{{short}}}", short):
                answer_of(text)
                is_correct(text, short)

        assert_linear(read, 1900, unit, most_growth=80.0)  # a short answer may cost the square of its length


def test_numbers_of_any_size_end():
    assert answer_of("Final Answer: " + "9" * 400) is None
    assert not is_correct(f"Final Answer: {'(' * 15}9{'^20)' * 15} = 1", "1")
    assert not is_correct("Final Answer: 1e999999", "1") and not is_correct("9" * 100_000, "8" * 100_000)
