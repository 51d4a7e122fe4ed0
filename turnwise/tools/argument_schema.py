"""The JSON schema of a tool's arguments, read in the dialect that it is written in."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match, relevance
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY
from referencing import Specification
from referencing.exceptions import NoSuchResource, Unresolvable
from referencing.jsonschema import specification_with

from turnwise.errors import ConfigError
from turnwise.tools.schema_cleaning import BY_NAME, DATA, cleaned, compiled

logger = logging.getLogger(__name__)

PATTERN_S = 0.1
"""Seconds within which a pattern must be matched, since the event loop waits for it."""
_DIALECTS: Mapping[str, type[Validator]] = {
    "2020-12": Draft202012Validator,
    "draft-07": Draft7Validator,
    "draft-04": Draft4Validator,
}
"""The dialects in which a schema without `$schema` is read: the first one that it fits."""
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_COMPOSING = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "$dynamicRef"}
_DIALECT_WORD = re.compile(r"\Ahttps?://json-schema\.org/(draft-\d+/schema|draft/[\d-]+/schema|schema)#?\Z")
"""A dialect's name in any of the spellings that servers write."""


class ArgumentSchema:
    """Checks the arguments of one tool's calls. An object is closed unless its schema says otherwise: an
    argument that isn't among the `properties` is refused. Null is allowed where the schema says `nullable`. A
    pattern that Python can't read is skipped, and so is one that took longer than `PATTERN_S`; a warning says
    so. Raises ConfigError if `parameters` isn't a JSON schema, is nested too deeply, or refers to what it
    doesn't have."""

    def __init__(self, tool: str, parameters: Any) -> None:
        self._tool = tool
        label = f"the schema of the tool {tool}"
        self._slow: set[str] = set()
        try:
            self._validator = self._checking(cleaned(parameters, label), label)
            list(self._validator.iter_errors({}))
        except (RecursionError, Unresolvable) as fault:
            raise ConfigError(
                f"{label} can't be followed ({fault}); let no $ref lead back to itself, and nest it less"
            ) from fault

    def _checking(self, readable: Any, label: str) -> Validator:
        dialect, parameters = _in_dialect(readable, label)
        _check_references(parameters, label)
        checks = {
            "pattern": self._check_pattern,
            "patternProperties": self._check_pattern_properties,
            "additionalProperties": self._check_additional_properties,
            "multipleOf": _check_multiple,
        }
        validator_class = extend(dialect, checks)
        validator: Validator = validator_class(_closed(parameters, dialect), registry=REGISTRY)
        return validator

    def problem_of(self, arguments: Any) -> str:
        """Why the schema refuses the arguments; "" if it allows them."""
        try:
            json.dumps(arguments, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as fault:
            return f"they can't be written as JSON: {fault}"[:500]
        try:
            errors = self._validator.iter_errors(arguments)
            error = best_match(errors, key=_relevance)
        except RecursionError:
            return "they are nested too deeply"
        if error is None:
            return ""
        return str(error.message)[:500]

    def _matches(self, pattern: str, text: str) -> bool:
        """Whether the pattern occurs in the text. True if that isn't known within `PATTERN_S`."""
        if pattern in self._slow:
            return True
        try:
            return compiled(pattern).search(text, timeout=PATTERN_S) is not None
        except TimeoutError:
            self._slow.add(pattern)
            logger.warning(
                "the pattern %r in the schema of the tool %s took more than %g s for a text of %d "
                "characters; it isn't checked any more",
                pattern,
                self._tool,
                PATTERN_S,
                len(text),
            )
            return True

    def _check_pattern(
        self,
        validator: Validator,
        pattern: str,
        instance: Any,
        schema: Any,
    ) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not self._matches(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def _check_pattern_properties(
        self,
        validator: Any,
        patterns: Mapping[str, Any],
        instance: Any,
        schema: Any,
    ) -> Iterator[ValidationError]:
        if not isinstance(instance, Mapping):
            return
        for pattern, part in patterns.items():
            for name, value in instance.items():
                if self._matches(pattern, name):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)

    def _check_additional_properties(
        self,
        validator: Any,
        additional: Any,
        instance: Any,
        schema: Mapping[str, Any],
    ) -> Iterator[ValidationError]:
        if not isinstance(instance, Mapping):
            return
        properties = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        extra: list[str] = []
        for name in instance:
            if name not in properties and not any(self._matches(pattern, name) for pattern in patterns):
                extra.append(name)
        if isinstance(additional, Mapping):
            for name in extra:
                yield from validator.descend(instance[name], additional, path=name)
        elif additional is False and extra:
            names = ", ".join(repr(name) for name in sorted(extra))
            verb = "was" if len(extra) == 1 else "were"
            yield ValidationError(f"Additional properties are not allowed ({names} {verb} unexpected)")


def _relevance(error: ValidationError) -> Any:
    # If a part of a composed schema refuses a value, the names of that part count as unknown too.
    return error.validator != "unevaluatedProperties", relevance(error)


def _check_multiple(
    validator: Validator,
    factor: Any,
    instance: Any,
    schema: Any,
) -> Iterator[ValidationError]:
    """Compares decimals as they are written: as binary fractions, 0.07 isn't a multiple of 0.01."""
    if not validator.is_type(instance, "number"):
        return
    quotient = Fraction(str(instance)) / Fraction(str(factor))
    if quotient.denominator != 1:
        yield ValidationError(f"{instance!r} is not a multiple of {factor}")


def _in_dialect(parameters: Any, label: str) -> tuple[type[Validator], Any]:
    """The dialect that `$schema` names, or if that is unknown, the first of `_DIALECTS` that the schema fits;
    and the schema with that dialect's name."""
    if not isinstance(parameters, Mapping):
        _check_form(Draft202012Validator, parameters, label)
        return Draft202012Validator, parameters
    unnamed = {key: value for key, value in parameters.items() if key != "$schema"}
    dialect = _named_dialect(parameters.get("$schema"), label) or _fitting_dialect(unnamed, label)
    _check_form(dialect, unnamed, label)
    return dialect, {"$schema": dialect.META_SCHEMA["$schema"], **unnamed}


def _named_dialect(name: Any, label: str) -> type[Validator] | None:
    if not name:
        return None
    spelling = _DIALECT_WORD.match(name) if isinstance(name, str) else None
    if spelling is not None:
        path = spelling[1]
        scheme = "https" if path.startswith("draft/") else "http"
        usual = f"{scheme}://json-schema.org/{path}"
        dialect: type[Validator] | None = validator_for({"$schema": usual}, default=None)
        if dialect is not None:
            return dialect
    logger.warning(
        "%s names the dialect %.80r, which isn't known; it is read as one without $schema", label, name
    )
    return None


def _fitting_dialect(parameters: Mapping[str, Any], label: str) -> type[Validator]:
    for name, dialect in _DIALECTS.items():
        try:
            dialect.check_schema(parameters)
        except SchemaError:
            continue
        if dialect is not Draft202012Validator:
            logger.info(
                "%s isn't one of JSON schema 2020-12; it is read as %s, since it has no $schema", label, name
            )
        return dialect
    return Draft202012Validator


def _check_form(dialect: type[Validator], parameters: Any, label: str) -> None:
    try:
        dialect.check_schema(parameters)
    except SchemaError as fault:
        place = ".".join(str(step) for step in fault.absolute_path) or "it"
        problem = f"{place}: {fault.message}"
        if fault.validator == "anyOf" and place.endswith("type"):
            problem = f"{place} is {fault.instance!r}, and a type is one of {', '.join(_TYPES)}"
        raise ConfigError(f"{label}: parameters isn't a JSON schema: {problem}") from fault


def _check_references(parameters: Any, label: str) -> None:
    """Raises ConfigError if a `$ref` names something that the schema doesn't have. Nothing is fetched."""
    if not isinstance(parameters, Mapping):
        return
    dialect = specification_with(str(parameters["$schema"]))
    root = REGISTRY.resolver_with_root(dialect.create_resource(parameters))
    for reference, resolver in _references_in(parameters, root, dialect):
        try:
            resolver.lookup(reference)
        except (Unresolvable, NoSuchResource) as fault:
            section, _, name = reference.removeprefix("#/").rpartition("/")
            owner = "the schema doesn't have"
            if reference.startswith("#/"):
                owner = f"its {section} don't have"
            raise ConfigError(f"{label}: $ref names {name}, which {owner}; add it") from fault


def _closed(parameters: Any, dialect: type[Validator]) -> Any:
    """The schema, which refuses arguments that it doesn't name unless it says otherwise."""
    if not isinstance(parameters, Mapping):
        return parameters
    properties = parameters.get("properties") or {}
    if not parameters.keys() & _COMPOSING:
        return {"additionalProperties": False, **parameters, "properties": properties}
    # `additionalProperties` knows no property of a schema's parts, and would refuse all of them.
    if "unevaluatedProperties" in dialect.VALIDATORS:
        return {"unevaluatedProperties": False, **parameters, "properties": properties}
    return {**parameters, "properties": properties}


def _references_in(schema: Any, resolver: Any, dialect: Specification[Any]) -> Iterator[tuple[str, Any]]:
    """Each `$ref` in the schema, with what resolves it: in a part with an `$id`, references are relative to
    that."""
    if isinstance(schema, list):
        for part in schema:
            yield from _references_in(part, resolver, dialect)
    if not isinstance(schema, Mapping):
        return
    here = resolver.in_subresource(dialect.create_resource(schema))
    if isinstance(schema.get("$ref"), str):
        yield schema["$ref"], here
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, Mapping):
            for part in value.values():
                yield from _references_in(part, here, dialect)
        elif key not in DATA:
            yield from _references_in(value, here, dialect)
