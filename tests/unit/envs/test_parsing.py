"""Actions in responses: patterns, thoughts, and what can't be read."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from turnwise.envs.parsing import parse_action
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
def test_the_pattern_that_asks_for_a_thought_sees_it_and_takes_the_last_group(text: str, expected: str | None) -> None:
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
def test_what_is_written_around_an_answer_changes_nothing(before: str, thought: str, action: str, after: str) -> None:
    text = f"{before}<think>{thought}<answer>{thought}</answer></think><answer>{action}</answer>{after}"
    assert parse_action(text, ANSWER_PATTERN) == action.strip()


@given(
    text=st.text(alphabet="<>/answerthik LU\n", max_size=80),
    pattern=st.sampled_from([ANSWER_PATTERN, THINK_ANSWER_PATTERN, None]),
)
def test_any_text_gives_a_stripped_action_or_none(text: str, pattern: str | None) -> None:
    action = parse_action(text, pattern)
    assert action is None or (action and action == action.strip())
