"""Actions in responses: patterns, thoughts, and what can't be read."""

from __future__ import annotations

import re

import pytest
from growth import assert_linear
from hypothesis import given, strategies as st

from turnwise.envs.parsing import parse_action, without_thoughts
from turnwise.envs.pattern_search import is_cheap
from turnwise.errors import ConfigError
from turnwise.spec import ANSWER_PATTERN, THINK_ANSWER_PATTERN

PLAIN = st.text(alphabet=st.characters(exclude_characters="<>"), max_size=30)
WORD = st.text(alphabet="abcXYZ √{}", min_size=1).filter(str.strip)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>Left</answer>", "Left"),
        ("I go <ANSWER>\n Left \n</Answer> now", "Left"),
        ("<answer>Left</answer><answer>Up</answer>", "Left"),
        ("<think>Up? <answer>Up</answer></think><answer>Left</answer>", "Left"),
        ("<THINK>Up</THINK><answer>Left</answer>", "Left"),
        ("the prompt opened it: <answer>Up</answer></think> <answer>Left</answer>", "Left"),
        ("<think>a<think>b</think><answer>Up</answer></think><answer>Left</answer>", "Left"),
        ("<think>Up <answer>Left</answer>", None),
        ("<answer>Left</answer><think>or", None),
        ("<answer>Left", None),
        ("<answer> </answer>", None),
        ("Left", None),
        ("", None),
    ],
)
def test_the_answer_pattern(text: str, expected: str | None) -> None:
    assert parse_action(text, ANSWER_PATTERN) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>x</think> <answer>Left</answer>", "Left"),
        ("<think>x <answer>Up</answer></think>\n<answer>Left</answer>", "Left"),
        ("<answer>Left</answer>", None),
        ("<think>x <answer>Left</answer>", None),
    ],
)
def test_the_pattern_that_asks_for_a_thought_sees_it_and_takes_the_last_group(
    text: str, expected: str | None
) -> None:
    assert parse_action(text, THINK_ANSWER_PATTERN) == expected


def test_without_a_pattern_or_a_group_the_whole_is_the_action() -> None:
    assert parse_action("<think>x</think> Left ", None) == "Left"
    assert parse_action("<think>Left", None) is None
    assert parse_action("go left now", r"left|right") == "left"
    assert parse_action("a\nb", r"^(.*)$") == "a\nb"


def test_a_broken_pattern_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="action_pattern"):
        parse_action("x", "(")


@given(before=PLAIN, thought=PLAIN, action=WORD, after=PLAIN)
def test_what_is_written_around_an_answer_changes_nothing(
    before: str, thought: str, action: str, after: str
) -> None:
    text = f"{before}<think>{thought}<answer>{thought}</answer></think><answer>{action}</answer>{after}"
    assert parse_action(text, ANSWER_PATTERN) == action.strip()


@given(
    text=st.text(alphabet="<>/answerthik LU\n", max_size=80),
    pattern=st.sampled_from([ANSWER_PATTERN, THINK_ANSWER_PATTERN, None]),
)
def test_any_text_gives_a_stripped_action_or_none(text: str, pattern: str | None) -> None:
    action = parse_action(text, pattern)
    assert action is None or (action and action == action.strip())


ORDINARY = [
    *(
        ANSWER_PATTERN,
        THINK_ANSWER_PATTERN,
        r"left|right|up|down",
        r"^(.*)$",
        r"\\boxed\{(.*?)\}",
        r"Action:\s*(\w+)",
        r"[0-9]+",
    ),
    r"Action:\s*(\w+)",
    *(r"####\s*(-?[0-9.,]+)", r"```(?:python)?\n(.*?)```", r"(\d{1,3})\s*,\s*(\d{1,3})"),
]


@pytest.mark.parametrize("pattern", ORDINARY)
def test_ordinary_patterns_need_no_other_process_for_ordinary_responses(pattern: str) -> None:
    thought = "I look at the grid: 3 up, 4 left.\n" * 40
    assert is_cheap(pattern, f"<think>{thought}</think> <answer>Left</answer> Action: go #### 3")


LONG = [
    *((None, "", "<think>", 140_000), (None, "", "</think>", 125_000)),
    *((ANSWER_PATTERN, "", "<answer>", 125_000), (THINK_ANSWER_PATTERN, "", "<think>", 140_000)),
    (THINK_ANSWER_PATTERN, "<think></think>", " ", 10**6),
    *((r"(a+)+$", "", "a", 5000), (r"^(.*)$", "", "x\n", 500_000), (r"[0-9]+", "", "1", 10**6)),
]
"""Pattern, beginning of the text, what is repeated, and how often; the text's end is `b`, which nothing
asks for."""


@pytest.mark.parametrize(("pattern", "beginning", "unit", "times"), LONG)
def test_no_text_makes_this_process_search_long(
    pattern: str | None, beginning: str, unit: str, times: int
) -> None:
    assert_linear(lambda times: parse_action(beginning + unit * times + "b", pattern), times, pattern)


def test_what_another_process_reads_is_the_same() -> None:
    nested = r"<answer>((?:\s*\w+)+)</answer>"
    assert not is_cheap(nested, "x")
    assert parse_action("so <ANSWER> Up left</answer>", nested) == "Up left"
    assert parse_action("\udcff é <answer>Ü</answer>", nested) == "Ü"
    assert parse_action("<answer>" + "a" * 60, nested) is None
    assert parse_action("<answer>Down</answer>", nested) == "Down", (
        "it is started again after a search that was ended"
    )


@given(st.lists(st.sampled_from(["<think>", "</think>", "<THINK>", "a", "b"]), max_size=12))
def test_thoughts_are_left_out_as_by_their_definition(words: list[str]) -> None:
    text = "".join(words)
    spoken = re.split(r"(?i)</think>", re.sub(r"(?is)<think>.*?</think>", "", text))[-1]
    assert without_thoughts(text) == (None if "<think>" in spoken.lower() else spoken)
