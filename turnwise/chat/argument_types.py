"""The types that a tool's schema allows for its parameters, and unquoted values converted to these types."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from turnwise.chat.call_json import JSON_DECODER, Unreadable, json_value
from turnwise.chat.rendering import Tools

_MAX_DEPTH = 8  # how deeply a parameter's schema is looked into


class ArgumentTypes:
    """The types that the schemas `tools` allow for the arguments of each tool. They are remembered, since one
    response may hold thousands of calls."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self._of_tool: dict[str, Mapping[str, set[str]]] = {}

    @cached_property
    def names(self) -> frozenset[str]:
        """The tools' names."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def of(self, name: str) -> Mapping[str, set[str]]:
        """The types of each parameter of the tool `name`; {} if there is no such tool."""
        if name not in self._of_tool:
            schema = next((tool["function"] for tool in self.tools if tool["function"]["name"] == name), None)
            if schema is None:
                return {}
            root = schema.get("parameters") or {}
            named = [part.get("properties") or {} for part in _parts(root, root)]
            self._of_tool[name] = {
                key: _allowed({"anyOf": [properties.get(key) for properties in named]}, root)
                for properties in named
                for key in properties
            }
        return self._of_tool[name]


def _allowed(wanted: Any, root: Mapping[str, Any]) -> set[str]:
    found = set[str]()
    for part in _parts(wanted, root):
        own = part.get("type") or ()
        found |= ({own} if isinstance(own, str) else set(own)) | (
            {"null"} if part.get("nullable") is True else set()
        )
    return found or {"string"}


def _parts(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas that it combines. A `$ref` names a place in `root`; references may form a
    circle."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema
    inner = [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key) or ()]
    if "$ref" in schema:
        place: Any = root
        for name in str(schema["$ref"]).split("/")[1:]:
            place = place.get(name) if isinstance(place, Mapping) else None
        inner.append(place)
    for part in inner:
        yield from _parts(part, root, depth + 1)


_WORDS = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
    "null": ("null", None),
}


def typed_value(text: str, wanted: set[str]) -> Any:
    """Converts an unquoted value to one of the schema types `wanted`. `True` and `False` become booleans if
    boolean is wanted, `None` and `null` become None if null is wanted. Other JSON is decoded unless string is
    wanted; the rest stays text."""
    kind, value = _WORDS.get(text.strip(), ("", None))
    if kind in wanted:
        return value
    if "string" in wanted:
        return text
    try:
        return json_value(JSON_DECODER.decode(text))
    except (ValueError, RecursionError, Unreadable):
        return text
