"""Schemas of arguments in several dialects, and patterns that can't be read or take too long."""

from __future__ import annotations

from typing import Any

import pytest
from messages import says

from turnwise.errors import ConfigError
from turnwise.tools.argument_schema import ArgumentSchema

DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
NEWEST = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
PAIR = [{"type": "number"}, {"type": "string"}]
ITEM = {"$id": "item", "properties": {"v": {"$ref": "#/$defs/k"}}, "$defs": {"k": {"type": "integer"}}}
"""A part with a name of its own, to which its references are relative."""
YEAR = r"^(?<year>\d{4})$"


def of(wanted: Any, **more: Any) -> ArgumentSchema:
    return ArgumentSchema("toy", {"type": "object", "properties": {"x": wanted}, **more})


@pytest.mark.parametrize(
    ("wanted", "more", "right", "wrong"),
    [
        ({"type": "array", "items": PAIR}, DRAFT_7, [1, "a"], ["a", 1]),
        ({"type": "array", "items": PAIR, "additionalItems": False}, DRAFT_7, [1, "a"], [1, "a", 2]),
        ({"type": "array", "items": PAIR}, {}, [1, "a"], ["a", 1]),
        (
            {"type": "array", "items": PAIR},
            {"$schema": "http://json-schema.org/draft-07/schema"},
            [1, "a"],
            ["a", 1],
        ),
        ({"type": "array", "prefixItems": PAIR}, NEWEST, [1, "a"], ["a", 1]),
        ({"type": "array", "prefixItems": PAIR}, {}, [1, "a"], ["a", 1]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, DRAFT_4, 1, 0),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, {}, 1, 0),
        ({"type": "number", "exclusiveMinimum": 0}, {}, 1, 0),
        ({"$ref": "#/definitions/n"}, DRAFT_7 | {"definitions": {"n": {"type": "integer"}}}, 1, "a"),
        ({"type": "integer"}, {"$schema": "https://example.org/own"}, 1, "a"),
        ({"type": "string", "pattern": "^a+$"}, {}, "aa", "ab"),
        ({"type": "string", "pattern": "^a+$"}, {}, "aa", "aa\n"),
        ({"type": "string", "pattern": r"^\$[$]\]$|b$"}, {}, "$$]", "$$]\n"),
        ({"type": "string", "nullable": True}, DRAFT_7, None, 1),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, {}, {"ab": 1}, {"ab": "b"}),
        (
            {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": {"type": "integer"}},
            {},
            {"a": "text", "b": 1},
            {"b": "text"},
        ),
        (
            {"type": "object", "properties": {"pattern": {"type": "string"}}},
            {},
            {"pattern": YEAR},
            {"pattern": 1},
        ),
        ({"type": "array", "items": {"type": "string", "nullable": True}}, {}, [None, "a"], [1]),
        ({"$ref": "#/$defs/n", "nullable": True}, {"$defs": {"n": {"type": "integer"}}}, None, "a"),
        ({"type": "string", "enum": ["a"], "nullable": True}, {}, None, "b"),
        (
            {"type": "integer", "description": None, "minimum": None},
            {"required": None, "$defs": None},
            1,
            "a",
        ),
        ({"type": "object", "properties": {"v": {"type": "integer"}, "w": None}}, {}, {"v": 1}, {"v": "a"}),
        ({"type": "integer", "default": None}, DRAFT_4 | {"required": []}, 1, "a"),
        ({"type": "number", "multipleOf": 0.01}, {}, 0.07, 0.075),
        ({"type": "number", "multipleOf": 0.1}, {}, 10**400, 0.25),
        (
            {"type": "array", "items": PAIR},
            {"$schema": "https://json-schema.org/draft-07/schema"},
            [1, "a"],
            ["a", 1],
        ),
        ({"type": "integer"}, {"$schema": 7}, 1, "a"),
        ({"$ref": "item"}, {"$defs": {"i": ITEM}}, {"v": 1}, {"v": "a"}),
        ({"$ref": "#/$defs/a~1b%25"}, {"$defs": {"a/b%": {"type": "integer"}}}, 1, "a"),
        ({"$ref": "#"}, {}, {"x": {"x": {}}}, {"x": 1}),
        ({"enum": [1, "1", None, {"a": 1}]}, {}, None, True),
    ],
)
def test_a_schema_is_read_in_its_own_dialect(
    wanted: Any, more: dict[str, Any], right: Any, wrong: Any
) -> None:
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


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, r"\$ref"),
        (deep(900), "nest it less"),
        ({"properties": {"x": {"type": "dict"}}}, r"properties\.x\.type is 'dict'.*object"),
        (
            {"properties": {"x": {"type": ["STRING", "null"]}}},
            says("properties.x.type", "'STRING'", "string"),
        ),
        ({"properties": {"x": {"required": True}}}, r"properties\.x\.required"),
    ],
)
def test_a_wrong_schema_is_refused_with_its_place(schema: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ArgumentSchema("toy", schema)


def test_arguments_that_are_nested_deeply_are_checked_or_refused() -> None:
    schema = of({"$ref": "#"})
    nested: dict[str, Any] = {}
    for _ in range(90):
        nested = {"x": nested}
    assert schema.problem_of(nested) == ""
    for _ in range(300):
        nested = {"x": nested}
    assert "nested" in schema.problem_of(nested)


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "string", "pattern": YEAR},
        {"type": "array", "items": {"type": "string", "pattern": r"\p{Lu}"}},
        {"type": "string", "pattern": r"[\uD800-\uDBFF][\uDC00-\uDFFF]"},
        {"type": "object", "patternProperties": {YEAR: {"type": "integer"}}},
    ],
)
def test_a_pattern_that_python_cannot_read_is_not_checked(
    wanted: Any, caplog: pytest.LogCaptureFixture
) -> None:
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
    schema.problem_of({"x": long if wanted["type"] == "string" else {long: 1}})
    assert "the tool toy" in caplog.text and "isn't checked any more" in caplog.text


@pytest.mark.parametrize("value", [1j, float("inf"), float("nan"), b"a", {1, 2}])
def test_arguments_that_are_no_json_are_refused(value: Any) -> None:
    assert "JSON" in of({}).problem_of({"x": value})
