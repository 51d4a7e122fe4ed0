"""Schemas of arguments in several dialects, and patterns that can't be read or take too long."""

from __future__ import annotations

import time
from typing import Any

import pytest

from turnwise.errors import ConfigError
from turnwise.tools.argument_schema import ArgumentSchema

DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
NEWEST = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
PAIR = [{"type": "number"}, {"type": "string"}]
YEAR = r"^(?<year>\d{4})$"


def of(wanted: Any, **more: Any) -> ArgumentSchema:
    return ArgumentSchema("toy", {"type": "object", "properties": {"x": wanted}, **more})


@pytest.mark.parametrize(
    ("wanted", "more", "right", "wrong"),
    [
        ({"type": "array", "items": PAIR}, DRAFT_7, [1, "a"], ["a", 1]),
        ({"type": "array", "items": PAIR, "additionalItems": False}, DRAFT_7, [1, "a"], [1, "a", 2]),
        ({"type": "array", "items": PAIR}, {}, [1, "a"], ["a", 1]),
        ({"type": "array", "items": PAIR}, {"$schema": "http://json-schema.org/draft-07/schema"}, [1, "a"], ["a", 1]),
        ({"type": "array", "prefixItems": PAIR}, NEWEST, [1, "a"], ["a", 1]),
        ({"type": "array", "prefixItems": PAIR}, {}, [1, "a"], ["a", 1]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, DRAFT_4, 1, 0),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, {}, 1, 0),
        ({"type": "number", "exclusiveMinimum": 0}, {}, 1, 0),
        ({"$ref": "#/definitions/n"}, DRAFT_7 | {"definitions": {"n": {"type": "integer"}}}, 1, "a"),
        ({"type": "integer"}, {"$schema": "https://example.org/own"}, 1, "a"),
        ({"type": "string", "pattern": "^a+$"}, {}, "aa", "ab"),
        ({"type": "string", "nullable": True}, DRAFT_7, None, 1),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, {}, {"ab": 1}, {"ab": "b"}),
        (
            {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": {"type": "integer"}},
            {},
            {"a": "text", "b": 1},
            {"b": "text"},
        ),
        ({"type": "object", "properties": {"pattern": {"type": "string"}}}, {}, {"pattern": YEAR}, {"pattern": 1}),
    ],
)
def test_a_schema_is_read_in_its_own_dialect(wanted: Any, more: dict[str, Any], right: Any, wrong: Any) -> None:
    schema = of(wanted, **more)
    assert schema.problem_of({"x": right}) == ""
    assert schema.problem_of({"x": wrong})
    assert "unexpected" in schema.problem_of({"y": 1})


def test_the_dialect_of_a_schema_without_one_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ArgumentSchema("noted", {"properties": {"x": {"type": "array", "items": PAIR}}})
    assert "noted" in caplog.text and "draft-07" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "more"),
    [
        ({"type": "objekt"}, {}),
        ({"type": "array", "items": PAIR}, NEWEST),
        ({"$ref": "#/definitions/gone"}, DRAFT_7),
        ({"$ref": "https://example.org/remote.json"}, {}),
        ({"type": "string", "minLength": "a"}, DRAFT_4),
    ],
)
def test_a_schema_that_is_none_in_its_dialect_is_refused(wanted: Any, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the tool toy"):
        of(wanted, **more)


def test_a_schema_that_leads_back_to_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\$ref"):
        ArgumentSchema("toy", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "string", "pattern": YEAR},
        {"type": "array", "items": {"type": "string", "pattern": r"\p{Lu}"}},
        {"type": "object", "patternProperties": {YEAR: {"type": "integer"}}},
    ],
)
def test_a_pattern_that_python_cannot_read_is_not_checked(wanted: Any, caplog: pytest.LogCaptureFixture) -> None:
    schema = ArgumentSchema(f"unread {wanted['type']}", {"properties": {"x": wanted}})
    values = {"string": "any", "array": ["any"], "object": {"1999": 1}}
    assert schema.problem_of({"x": values[wanted["type"]]}) == ""
    assert f"unread {wanted['type']}" in caplog.text and "pattern" in caplog.text


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "string", "pattern": "^(a|aa)+$"},
        {"type": "object", "patternProperties": {"^(a|aa)+$": {}}},
        {"type": "object", "patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False},
    ],
)
def test_a_pattern_that_takes_too_long_is_given_up(wanted: Any, caplog: pytest.LogCaptureFixture) -> None:
    schema = of(wanted)
    long = "a" * 50 + "!"
    started = time.thread_time()
    schema.problem_of({"x": long if wanted["type"] == "string" else {long: 1}})
    assert time.thread_time() - started < 2
    assert "the tool toy" in caplog.text and "isn't checked any more" in caplog.text


@pytest.mark.parametrize("value", [1j, float("inf"), float("nan"), b"a", {1, 2}])
def test_arguments_that_are_no_json_are_refused(value: Any) -> None:
    assert "JSON" in of({}).problem_of({"x": value})
