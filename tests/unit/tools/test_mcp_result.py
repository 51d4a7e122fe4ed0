"""What the model reads of each kind of result of an MCP tool."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from turnwise.tools.mcp_messages import with_known_parts
from turnwise.tools.mcp_result import text_of

BLOB = base64.b64encode(b"12345").decode()


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def resource(**contents: Any) -> dict[str, Any]:
    return {"type": "resource", "resource": {"uri": "file:///a", "mimeType": "text/plain", **contents}}


@pytest.mark.parametrize(
    ("content", "structured", "shown"),
    [
        ([], None, ""),
        ([text("")], None, ""),
        ([], {"result": None}, ""),
        ([text("a"), text("b")], None, "a\nb"),
        ([resource(text="the file says 42")], None, "the file says 42"),
        ([], {"a": 1}, '{"a": 1}'),
        ([text("found 3")], {"hits": [1, 2, 3]}, 'found 3\n{"hits": [1, 2, 3]}'),
        ([text('{\n  "b": 2,\n  "a": 1\n}')], {"a": 1, "b": 2}, '{\n  "b": 2,\n  "a": 1\n}'),
        ([text("3")], {"result": 3}, "3"),
        ([text("true")], {"result": 1}, 'true\n{"result": 1}'),
        ([text("a b")], {"result": "a b"}, "a b"),
        ([text("1"), text("x")], {"result": [1, "x"]}, "1\nx"),
        ([text("1")], {"result": [1]}, "1"),
        ([text("Genève")], {"city": "Genève"}, 'Genève\n{"city": "Genève"}'),
        ([resource(text='{"a": 1}')], {"a": 1}, '{"a": 1}'),
        ([], {"result": []}, '{"result": []}'),
        ([text("[]")], {"result": []}, "[]"),
        ([], {}, "{}"),
        ([text("note"), text('{"a":1}')], {"a": 1}, 'note\n{"a":1}'),
        (
            [text('{"a":1}'), {"type": "resource_link", "name": "n", "uri": "x://n"}],
            {"a": 1},
            '{"a":1}\nn (x://n)',
        ),
    ],
)
def test_text_and_structured_content(content: list[dict[str, Any]], structured: Any, shown: str) -> None:
    types = pytest.importorskip("mcp").types
    result = types.CallToolResult.model_validate({"content": content, "structuredContent": structured})
    assert text_of(result) == shown


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (
            {"type": "resource_link", "name": "notes", "uri": "file:///notes.md"},
            ["notes", "file:///notes.md"],
        ),
        ({"type": "image", "data": BLOB, "mimeType": "image/png"}, ["image", "image/png", "5 bytes"]),
        ({"type": "audio", "data": BLOB, "mimeType": "audio/wav"}, ["audio", "audio/wav", "5 bytes"]),
        (
            {
                "type": "resource",
                "resource": {"uri": "file:///a.pdf", "mimeType": "application/pdf", "blob": BLOB},
            },
            ["resource", "file:///a.pdf", "application/pdf", "5 bytes"],
        ),
        ({"type": "resource", "resource": {"uri": "file:///a", "blob": BLOB}}, ["unknown type", "5 bytes"]),
    ],
)
def test_what_is_no_text_is_named(part: dict[str, Any], named: list[str]) -> None:
    types = pytest.importorskip("mcp").types
    shown = text_of(types.CallToolResult.model_validate({"content": [part]}))
    assert all(word in shown for word in named), shown


@pytest.mark.parametrize(
    ("result", "readable"),
    [
        ({"content": None}, {"content": []}),
        ({"structuredContent": {"a": 1}}, {"structuredContent": {"a": 1}, "content": []}),
        (
            {"content": [text("a"), {"type": "text"}, 5]},
            {"content": [text("a"), text(""), text("[part left out: unknown type]")]},
        ),
        ({"tools": [{"name": "f"}]}, {"tools": [{"name": "f", "inputSchema": {"type": "object"}}]}),
        ({"tools": [{"name": "f", "inputSchema": {"type": "array"}}, {"inputSchema": {}}, 5]}, {"tools": []}),
        ({"protocolVersion": "1"}, {"protocolVersion": "1"}),
    ],
)
def test_a_message_gets_the_protocol_s_form(result: dict[str, Any], readable: dict[str, Any]) -> None:
    types = pytest.importorskip("mcp").types
    assert with_known_parts(result, types) == readable
