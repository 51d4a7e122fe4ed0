"""Makes a tool's schema one that Python can check: other programs write more than JSON schema has, and
patterns that only other languages read."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import regex

logger = logging.getLogger(__name__)

BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
"""Keywords whose value maps names to schemas."""
DATA = {"const", "default", "enum", "example", "examples"}
"""Keywords whose value is no schema."""
_WORD_OF_PATTERN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\$", re.DOTALL)
"""An escaped character, a class of characters, or `$`."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_RESTRICTING = {"$ref", "allOf", "anyOf", "oneOf", "enum", "const"}
"""Keywords besides `type` that may forbid null."""


def cleaned(schema: Any, label: str) -> Any:
    """The schema of `label` without keywords and properties that are null (tables pad with them), without an
    empty `required` (draft-04 has none), and without patterns that Python can't read, each of which a warning
    names. Where it says `nullable`, which validators of JSON schemas ignore, null is allowed."""
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [cleaned(part, label) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DATA:
            result[key] = value
        elif value is None or (key == "required" and value == []):
            continue
        elif key == "pattern" and isinstance(value, str):
            if _is_readable(value, label):
                result[key] = value
        elif key in BY_NAME and isinstance(value, Mapping):
            names = [name for name in value if value[name] is not None]
            if key == "patternProperties":
                names = [name for name in names if _is_readable(name, label)]
            result[key] = {name: cleaned(value[name], label) for name in names}
        else:
            result[key] = cleaned(value, label)
    return _with_null(result)


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """The pattern in Python's form. In JSON schemas `$` is the end of the text; Python's also fits before a
    last line break."""
    return regex.compile(_WORD_OF_PATTERN.sub(_in_python, pattern))


def _in_python(word: re.Match[str]) -> str:
    if word.group() == "$":
        return r"\Z"
    return word.group()


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("nullable") is not True:
        return schema
    restricting = schema.keys() & _RESTRICTING
    if "type" not in schema and not restricting:
        return schema
    if "type" not in schema or restricting - {"enum"}:
        return {"anyOf": [schema, {"type": "null"}]}
    types = schema["type"]
    if not isinstance(types, list):
        types = [types]
    if "null" not in types:
        types = [*types, "null"]
    with_null = {**schema, "type": types}
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        with_null["enum"] = [*schema["enum"], None]
    return with_null


def _is_readable(pattern: str, label: str) -> bool:
    problem = "half a character of UTF-16" if _SURROGATE.search(pattern) else ""
    try:
        re.compile(pattern)
        compiled(pattern)
    except (re.error, regex.error, OverflowError, RecursionError) as fault:
        problem = str(fault)
    if problem:
        logger.warning(
            "%s: Python can't read the pattern %r (%s); it isn't checked",
            label,
            pattern,
            problem,
        )
    return not problem
