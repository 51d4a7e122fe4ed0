"""The types that a tool's schema allows for its parameters, and unquoted values converted to these types."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
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
            functions = [tool["function"] for tool in self.tools]
            matching = [function for function in functions if function["name"] == name]
            if not matching:
                return {}
            schema = matching[0].get("parameters") or {}
            self._of_tool[name] = _types_of_properties(schema)
        return self._of_tool[name]


def _types_of_properties(root: Mapping[str, Any]) -> dict[str, set[str]]:
    groups = [part.get("properties") or {} for part in _parts(root, root)]
    types: dict[str, set[str]] = {}
    for key in chain.from_iterable(groups):
        schemas = [properties.get(key) for properties in groups]
        types[key] = _types_of({"anyOf": schemas}, root)
    return types


def _types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    types = set[str]()
    for part in _parts(schema, root):
        declared = part.get("type") or ()
        if isinstance(declared, str):
            types.add(declared)
        else:
            types.update(declared)
        if part.get("nullable") is True:
            types.add("null")
    return types or {"string"}


def _parts(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas that it combines. A `$ref` names a place in `root`; references may form a
    circle."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema
    inner: list[Any] = []
    for key in ("allOf", "anyOf", "oneOf"):
        inner += schema.get(key) or ()
    if "$ref" in schema:
        inner.append(_referenced(str(schema["$ref"]), root))
    for part in inner:
        yield from _parts(part, root, depth + 1)


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of `root` that a reference like `#/$defs/side` names; None if there is none."""
    part: Any = root
    for name in reference.split("/")[1:]:
        if not isinstance(part, Mapping):
            return None
        part = part.get(name)
    return part


_WORDS = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
    "null": ("null", None),
}


def typed_value(text: str, types: set[str]) -> Any:
    """Converts an unquoted value to one of the schema's `types`. `True` and `False` become booleans if
    boolean is among them, `None` and `null` become None if null is. Other JSON is decoded unless string is
    among them; the rest stays text."""
    kind, value = _WORDS.get(text.strip(), ("", None))
    if kind in types:
        return value
    if "string" in types:
        return text
    try:
        return json_value(JSON_DECODER.decode(text))
    except (ValueError, RecursionError, Unreadable):
        return text
