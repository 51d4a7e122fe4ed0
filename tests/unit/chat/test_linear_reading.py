"""Whatever a model writes, reading it takes time in proportion to its length."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from chat_messages import tool
from growth import assert_linear

from turnwise.chat.tool_calls import (
    DeepSeekParser,
    Glm45Parser,
    GptOssParser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    PythonTagParser,
    Qwen3CoderParser,
)
from turnwise.envs.parsing import without_thoughts
from turnwise.inference.judge import _SCORE, _WINNER
from turnwise.rl_tool.evaluation import _EQUATION
from turnwise.spec import TOOL_PARSERS

SIZE = 1_000_000
SCHEMA = tool("f", "Does it.", a="string", x="array")
ANY = ("\n", " ", "<think>", "</think>", "{", "[", '"', "1", "```")
"""Texts that any model may repeat."""
DEEPSEEK = "<｜tool▁call▁begin｜>"
HARMONY = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
OPENED: dict[type, tuple[str, ...]] = {
    HermesParser: ("<tool_call>", '<tool_call>{"name": "f", "arguments": {'),
    Qwen3CoderParser: (
        *("<tool_call>", "<function=", "<function=f>", "<parameter=a>"),
        *("<function=f><parameter=a>", "<function=f><parameter=x>", "<function=f><parameter=x>>"),
    ),
    Glm45Parser: ("<tool_call>", "<tool_call>f<arg_key>", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
    Llama3JsonParser: ("<|python_tag|>", '{"name":', '{"name": "f", "parameters": {'),
    PythonTagParser: ("<|python_tag|>", "<|python_tag|>f(", "<|python_tag|>f(x=["),
    MistralParser: ("[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]f[CALL_ID]"),
    GptOssParser: ("<|channel|>", "<|channel|>commentary", HARMONY, "to=functions.", "<|start|>assistant"),
    DeepSeekParser: (
        DEEPSEEK,
        f"{DEEPSEEK}f<｜tool▁sep｜>",
        "<｜tool▁calls▁begin｜>",
        f"{DEEPSEEK}f<｜tool▁sep｜>f```json",
    ),
}
"""Marks, and beginnings of calls, that nothing closes."""
CLOSED: dict[type, tuple[str, ...]] = {
    HermesParser: ('<tool_call>{"name": "f", "arguments": {}}</tool_call>',),
    Qwen3CoderParser: ("<function=f></function>", "<function=f><parameter=a>1</parameter></function>"),
    Glm45Parser: (
        "<tool_call>f</tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    ),
    Llama3JsonParser: ('{"name": "f", "parameters": {}}', '{"name": 1}'),
    PythonTagParser: ("<|python_tag|>f(a=1)", '<|python_tag|>{"name": "f"}'),
    MistralParser: ("[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS][]"),
    GptOssParser: (HARMONY + "{}<|call|>", "<|channel|>analysis<|message|>"),
    DeepSeekParser: (f"{DEEPSEEK}f<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>",),
}
"""Calls and other things that can be read."""


def forms_of(parser: type) -> list[Callable[[int], str]]:
    """Texts of any size: each mark repeated, alone and with white space, and once before endless white space
    or numbers."""
    forms: list[Callable[[int], str]] = []
    for mark in (*OPENED[parser], *CLOSED[parser]):
        forms.append(lambda size, mark=mark: mark * (size // len(mark)))
    for mark in OPENED[parser]:
        forms.append(lambda size, mark=mark: (mark + "\n ") * (size // (len(mark) + 2)))
        forms.append(lambda size, mark=mark: mark + "\n" * size + "x")
        forms.append(lambda size, mark=mark: mark + "[" + "1," * (size // 2) + "1]")
    return forms


def test_every_parser_is_tried():
    classes = {f"{parser.__module__}:{parser.__name__}" for parser in OPENED}
    assert classes == set(TOOL_PARSERS.values())


@pytest.mark.parametrize("parser", OPENED)
def test_a_parser_reads_a_megabyte_of_any_text_in_linear_time(parser):
    for form in forms_of(parser):

        def read(size: int, form: Callable[[int], str] = form) -> None:
            parsed = parser().parse(form(size), [SCHEMA])
            assert len(parsed.errors) <= 40, "each becomes a message for the model"

        assert_linear(read, SIZE, form(60))


@pytest.mark.parametrize("parser", OPENED)
def test_a_parser_reads_repeated_white_space_and_brackets(parser):
    for unit in ANY:
        assert_linear(
            lambda size, unit=unit: parser().parse(unit * (size // len(unit)), [SCHEMA]), SIZE // 4, unit
        )


@pytest.mark.parametrize(
    ("read", "units"),
    [
        (without_thoughts, ("<think>", "</think>", "<think></think>")),
        (_SCORE.findall, ("\n", "score ", "score\n", "score 1 ", "score: 1/ \n", "-")),
        (_WINNER.findall, ("\n", "winner ", "winner A\n", "winner\n", "*")),
        (_EQUATION.findall, ("1", "1 ", "1+1=<<", "1+1= ", "1-", "1+")),
    ],
)
def test_other_readers_of_answers_are_as_fast(read, units):
    for unit in units:
        assert_linear(lambda size, unit=unit: read(unit * (size // len(unit))), SIZE, unit)
        assert_linear(lambda size, unit=unit: read(unit + " " * size + "x"), SIZE, unit)


def test_reading_stops_after_many_calls_that_can_not_be_read_and_says_so():
    parsed = HermesParser().parse("<tool_call>no</tool_call>" * 100, [SCHEMA])
    assert len(parsed.errors) == 32 and "nothing more of this response is read" in parsed.errors[-1]
    few = HermesParser().parse("<tool_call>no</tool_call>" * 31 + CLOSED[HermesParser][0], [SCHEMA])
    assert len(few.errors) == 31 and len(few.tool_calls) == 1


DEEP = "[" * 150 + "]" * 150


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        *(
            (PythonTagParser, f"<|python_tag|>f(a={value})")
            for value in ("1j", "b'x'", "{1, 2}", "1e999", "{1: 2}", DEEP)
        ),
        (PythonTagParser, f"<|python_tag|>f(a=0x{'f' * 5000})"),
        (PythonTagParser, "<|python_tag|>f(a=...)"),
        (Llama3JsonParser, '{"name": "f", "parameters": {"a": 1e999}}'),
        (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": -1e999}}</tool_call>'),
        (HermesParser, f'<tool_call>{{"name": "f", "arguments": {{"a": {DEEP}}}}}</tool_call>'),
        (MistralParser, "[TOOL_CALLS]f[ARGS]{" + '"a": 1e400}'),
    ],
)
def test_a_value_that_json_lacks_makes_a_call_unreadable(parser, text):
    parsed = parser().parse(text, [SCHEMA])
    assert parsed.tool_calls == () and len(parsed.errors) == 1


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        (PythonTagParser, "<|python_tag|>f(a=(1, (2,)), x={'k': None})", {"a": [1, [2]], "x": {"k": None}}),
        (
            HermesParser,
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
            {"a": "\ufffd"},
        ),
        (Qwen3CoderParser, "<function=f><parameter=x>[1e999]</parameter></function>", {"x": "[1e999]"}),
    ],
)
def test_what_a_parser_yields_can_be_written_as_json(parser, text, arguments):
    [call] = parser().parse(text, [SCHEMA]).tool_calls
    assert call.arguments == arguments
    json.dumps(call.arguments, allow_nan=False).encode()
    json.dumps(call.arguments, ensure_ascii=False).encode()


def test_python_calls_behind_much_text_are_not_read():
    parsed = PythonTagParser().parse("x" * 200_000 + "<|python_tag|>f(a=1)", [SCHEMA])
    assert parsed.tool_calls == () and "behind the first" in parsed.errors[0]
