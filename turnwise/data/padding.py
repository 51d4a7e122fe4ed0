"""Removes the nulls with which tables (Arrow, Parquet, `datasets`) pad objects: a table gives each object
every key that the same object has in any other row. A null key counts as absent, unless a schema says that
null is a value."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from turnwise.types import Message

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a JSON schema that hold a mapping from names to schemas."""
_PARTS = ("anyOf", "oneOf", "allOf")
_MAX_DEPTH = 64


def without_nulls(value: Any) -> Any:
    """The value without keys that are null, at any depth. Nulls that are entries of lists stay, since no
    table adds those.

    >>> without_nulls({"a": 1, "b": None, "c": [{"d": None}, None]})
    {'a': 1, 'c': [{}, None]}
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def are_messages(value: Any) -> bool:
    """Whether a column's value is a list of messages."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, Mapping) and "role" in entry for entry in value)


def plain_schema(schema: Any) -> Any:
    """A tool's schema without padding, at any depth. A `default` that is null stays where its own schema
    allows null.

    >>> plain_schema({"properties": {"city": {"type": "string"}, "a": None}, "required": None})
    {'properties': {'city': {'type': 'string'}}}
    """
    if isinstance(schema, list):
        return [plain_schema(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: _plain_keyword(key, value) for key, value in schema.items() if value is not None}
    has_null_default = "default" in schema and schema["default"] is None
    if not has_null_default or not _names_null(plain, plain):
        return plain
    return {key: plain.get(key) for key in schema if key in plain or key == "default"}


def _plain_keyword(key: str, value: Any) -> Any:
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: plain_schema(inner) for name, inner in value.items() if inner is not None}
    if key in ("default", "const", "enum", "examples"):
        return without_nulls(value)
    return plain_schema(value)


def plain_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments without padding. A null stays where the tool's plain schema of parameters allows
    null.

    >>> parameters = {"properties": {"city": {"type": "string"}, "unit": {"type": ["string", "null"]}}}
    >>> plain_arguments({"city": "Oslo", "unit": None, "a": None}, parameters)
    {'city': 'Oslo', 'unit': None}
    """
    return dict(_plain_value(arguments, [schema], schema))


def without_padding(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[Message]:
    """The messages without padding: null keys are left out at any depth, except `content`, and what the
    schema of a called tool allows to be null. `tools` are plain schemas. Calls without a `content` get a null
    one, as in tables."""
    parameters = dict(_parameters_by_name(tools))
    return [_plain_message(message, parameters) for message in messages]


def _plain_message(message: Message, parameters: Mapping[str, Any]) -> Message:
    plain: Message = {}
    for key, value in message.items():
        if key == "tool_calls" and isinstance(value, list):
            plain[key] = [_plain_call(call, parameters) for call in value]
        elif value is not None or key == "content":
            plain[key] = without_nulls(value)
    if plain.get("tool_calls"):
        plain.setdefault("content", None)
    return plain


def _plain_call(call: Any, parameters: Mapping[str, Any]) -> Any:
    plain = without_nulls(call)
    if not isinstance(call, Mapping):
        return plain
    function = call.get("function")
    if not isinstance(function, Mapping):
        return plain
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        schema = parameters.get(str(function.get("name")), {})
        plain["function"]["arguments"] = plain_arguments(arguments, schema)
    return plain


def _parameters_by_name(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            continue
        parameters = function.get("parameters")
        if isinstance(parameters, Mapping):
            yield str(function.get("name")), parameters


def _plain_value(value: Any, schemas: Sequence[Any], root: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        plain = {}
        for key, inner in value.items():
            of_key = _joined(_of_key(schema, key, root) for schema in schemas)
            if inner is not None or any(_allows_null(schema, root) for schema in of_key):
                plain[key] = _plain_value(inner, of_key, root)
        return plain
    if isinstance(value, list):
        of_entries = _joined(_of_entries(schema, root) for schema in schemas)
        return [_plain_value(inner, of_entries, root) for inner in value]
    return value


def _joined(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(parts))


def _of_key(schema: Any, key: str, root: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that a schema has for a key of an object."""
    for part in _parts(schema, root):
        properties = part.get("properties")
        additional = part.get("additionalProperties")
        if isinstance(properties, Mapping) and key in properties:
            yield properties[key]
        elif isinstance(additional, Mapping):
            yield additional


def _of_entries(schema: Any, root: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that a schema has for the entries of a list."""
    for part in _parts(schema, root):
        for keyword in ("items", "prefixItems"):
            inner = part.get(keyword)
            if isinstance(inner, list):
                yield from inner
            elif inner is not None:
                yield inner


def _parts(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The schema, what its `$ref` names, and the parts that it is composed of."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema
    if "$ref" in schema:
        referred = _referred(schema["$ref"], root)
        yield from _parts(referred, root, depth + 1)
    for keyword in _PARTS:
        for part in schema.get(keyword) or ():
            yield from _parts(part, root, depth + 1)


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    target: Any = root
    path = str(reference).partition("#")[2].strip("/")
    if not path:
        return target
    for name in path.split("/"):
        if not isinstance(target, Mapping):
            return None
        target = target.get(name)
    return target


def _allows_null(schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return schema is True
    if schema.get("nullable") is True:
        return True
    types = schema.get("type", "null")
    if not isinstance(types, list):
        types = [types]
    if "null" not in types:
        return False
    if "const" in schema and schema["const"] is not None:
        return False
    if "enum" in schema and None not in schema["enum"]:
        return False
    if "$ref" in schema:
        referred = _referred(schema["$ref"], root)
        if not _allows_null(referred, root, depth + 1):
            return False
    for part in schema.get("allOf") or ():
        if not _allows_null(part, root, depth + 1):
            return False
    for keyword in ("anyOf", "oneOf"):
        parts = schema.get(keyword)
        if parts and not any(_allows_null(part, root, depth + 1) for part in parts):
            return False
    return True


def _names_null(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether a schema allows null and restricts values at all, as a schema without any keyword doesn't."""
    restrictions = ("type", "nullable", "enum", "const", "$ref", *_PARTS)
    if not any(keyword in schema for keyword in restrictions):
        return False
    return _allows_null(schema, root)
