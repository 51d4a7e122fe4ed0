"""The JSON schema of a tool's arguments, read in the dialect that it is written in."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import regex
from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match, relevance
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY
from referencing.exceptions import NoSuchResource, Unresolvable
from referencing.jsonschema import specification_with

from turnwise.errors import ConfigError

logger = logging.getLogger(__name__)

PATTERN_S = 0.1
"""Seconds within which a pattern must be matched, since the event loop waits for it."""
_DIALECTS: Mapping[str, type[Validator]] = {
    "2020-12": Draft202012Validator,
    "draft-07": Draft7Validator,
    "draft-04": Draft4Validator,
}
"""The dialects in which a schema without `$schema` is read: the first one that it fits."""
_COMPOSING = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "$dynamicRef"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
"""Keywords whose value maps names to schemas."""
_DATA = {"const", "default", "enum", "example", "examples"}
"""Keywords whose value is no schema."""


class ArgumentSchema:
    """Checks the arguments of one tool's calls. An object is closed unless its schema says otherwise: an argument that isn't
    among the `properties` is refused. `nullable` adds null to a property's types. A pattern that Python can't read is skipped,
    and so is one that took longer than `PATTERN_S`; a warning says so. Raises ConfigError if `parameters` isn't a JSON schema,
    or refers to what it doesn't have."""

    def __init__(self, tool: str, parameters: Any) -> None:
        self._tool = tool
        what = f"the schema of the tool {tool}"
        readable = _without_unreadable(parameters, what)
        dialect = _dialect_of(readable, what)
        _check_references(readable, what)
        checks = {
            "pattern": self._check_pattern,
            "patternProperties": self._check_pattern_properties,
            "additionalProperties": self._check_additional_properties,
        }
        self._slow: set[str] = set()
        validator = extend(dialect, checks)(_closed(readable, dialect), registry=REGISTRY)
        try:
            list(validator.iter_errors({}))
        except (RecursionError, Unresolvable) as fault:
            raise ConfigError(f"{what} can't be followed ({fault}); let no $ref lead back to itself") from fault
        self._validator: Validator = validator

    def problem_of(self, arguments: Any) -> str:
        """Why the schema refuses the arguments; "" if it allows them."""
        try:
            json.dumps(arguments, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as fault:
            return f"they can't be written as JSON: {fault}"[:500]
        # If a part of a composed schema refuses a value, the names of that part count as unknown too.
        errors = self._validator.iter_errors(arguments)
        error = best_match(errors, key=lambda e: (e.validator != "unevaluatedProperties", relevance(e)))
        return "" if error is None else str(error.message)[:500]

    def _matches(self, pattern: str, text: str) -> bool:
        """Whether the pattern occurs in the text. True if that isn't known within `PATTERN_S`."""
        if pattern in self._slow:
            return True
        try:
            return _compiled(pattern).search(text, timeout=PATTERN_S) is not None
        except TimeoutError:
            self._slow.add(pattern)
            what = f"the pattern {pattern!r} in the schema of the tool {self._tool} took more than {PATTERN_S:g} s"
            logger.warning("%s for a text of %d characters; it isn't checked any more", what, len(text))
            return True

    def _check_pattern(self, validator: Validator, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not self._matches(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def _check_pattern_properties(
        self, validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        if not isinstance(instance, Mapping):
            return
        for pattern, wanted in patterns.items():
            for name, value in instance.items():
                if self._matches(pattern, name):
                    yield from validator.descend(value, wanted, path=name, schema_path=pattern)

    def _check_additional_properties(
        self, validator: Any, wanted: Any, instance: Any, schema: Mapping[str, Any]
    ) -> Iterator[ValidationError]:
        if not isinstance(instance, Mapping):
            return
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        extra = [name for name in instance if name not in named]
        extra = [name for name in extra if not any(self._matches(pattern, name) for pattern in patterns)]
        if isinstance(wanted, Mapping):
            for name in extra:
                yield from validator.descend(instance[name], wanted, path=name)
        elif wanted is False and extra:
            names = ", ".join(repr(name) for name in sorted(extra))
            verb = "was" if len(extra) == 1 else "were"
            yield ValidationError(f"Additional properties are not allowed ({names} {verb} unexpected)")


def _dialect_of(parameters: Any, what: str) -> type[Validator]:
    """The dialect that `$schema` names; if it names none that is known, the first of `_DIALECTS` that the schema fits."""
    named = parameters.get("$schema") if isinstance(parameters, Mapping) else None
    own = validator_for(parameters, default=None) if named else None
    if own is not None:
        _check_form(own, parameters, what)
        return own
    if named:
        logger.warning("%s", f"{what} names the dialect {named!r:.80}, which isn't known; it is read as one without $schema")
        parameters = {key: value for key, value in parameters.items() if key != "$schema"}
    for name, dialect in _DIALECTS.items():
        try:
            dialect.check_schema(parameters)
        except SchemaError:
            continue
        if dialect is not Draft202012Validator:
            logger.info("%s", f"{what} isn't one of JSON schema 2020-12; it is read as {name}, since it has no $schema")
        return dialect
    _check_form(Draft202012Validator, parameters, what)
    raise AssertionError("check_schema raises for this dialect, as it did before")


def _check_form(dialect: type[Validator], parameters: Any, what: str) -> None:
    try:
        dialect.check_schema(parameters)
    except SchemaError as fault:
        raise ConfigError(f"{what}: parameters isn't a JSON schema: {fault.message}") from fault


def _check_references(parameters: Any, what: str) -> None:
    """Raises ConfigError if a `$ref` names something that the schema doesn't have. Nothing is fetched."""
    if not isinstance(parameters, Mapping):
        return
    dialect = specification_with(str(parameters.get("$schema") or "").rstrip("#"), default=specification_with(_NEWEST))
    resolver = REGISTRY.resolver_with_root(dialect.create_resource(parameters))
    for part in _schemas_in(parameters):
        reference = part.get("$ref")
        if not isinstance(reference, str):
            continue
        try:
            resolver.lookup(reference)
        except (Unresolvable, NoSuchResource) as fault:
            section, _, name = reference.removeprefix("#/").rpartition("/")
            owner = f"its {section} don't have" if reference.startswith("#/") else "the schema doesn't have"
            raise ConfigError(f"{what}: $ref names {name}, which {owner}; add it") from fault


_NEWEST = "https://json-schema.org/draft/2020-12/schema"


def _closed(parameters: Any, dialect: type[Validator]) -> Any:
    """The schema, which refuses arguments that it doesn't name unless it says otherwise."""
    if not isinstance(parameters, Mapping):
        return parameters
    properties = {name: _with_null(wanted) for name, wanted in (parameters.get("properties") or {}).items()}
    if not parameters.keys() & _COMPOSING:
        return {"additionalProperties": False, **parameters, "properties": properties}
    # `additionalProperties` knows no property of a schema's parts, and would refuse all of them.
    if "unevaluatedProperties" in dialect.VALIDATORS:
        return {"unevaluatedProperties": False, **parameters, "properties": properties}
    return {**parameters, "properties": properties}


def _with_null(wanted: Any) -> Any:
    """The schema of a parameter. If it says `nullable`, which validators of JSON schemas ignore, null is added to its types."""
    if not isinstance(wanted, Mapping) or wanted.get("nullable") is not True or "type" not in wanted:
        return wanted
    own = wanted["type"] if isinstance(wanted["type"], list) else [wanted["type"]]
    return {**wanted, "type": [*own, "null"]} | ({"enum": [*wanted["enum"], None]} if "enum" in wanted else {})


def _without_unreadable(schema: Any, what: str) -> Any:
    """The schema without patterns that only another language's regular expressions know. A warning names each."""
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_without_unreadable(part, what) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            kept[key] = value
        elif key in _BY_NAME and isinstance(value, Mapping):
            readable = partial(_is_readable, what=what) if key == "patternProperties" else _is_any
            kept[key] = {name: _without_unreadable(part, what) for name, part in value.items() if readable(name)}
        elif key != "pattern" or not isinstance(value, str) or _is_readable(value, what):
            kept[key] = _without_unreadable(value, what)
    return kept


def _is_any(pattern: Any) -> bool:
    return True


def _is_readable(pattern: str, what: str) -> bool:
    try:
        re.compile(pattern)
        _compiled(pattern)
    except (re.error, regex.error, OverflowError, RecursionError) as fault:
        logger.warning("%s", f"{what}: Python can't read the pattern {pattern!r} ({fault}); it isn't checked")
        return False
    return True


def _schemas_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All parts of a schema that are schemas themselves."""
    if isinstance(schema, list):
        for part in schema:
            yield from _schemas_in(part)
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            for part in value.values():
                yield from _schemas_in(part)
        elif key not in _DATA:
            yield from _schemas_in(value)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)
