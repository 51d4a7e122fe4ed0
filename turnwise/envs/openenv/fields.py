"""Puts an action's text into the fields that an OpenEnv server asks for, and an observation's fields into a
text."""

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.errors import EnvironmentFault, nearest

_ALWAYS = ("metadata", "done", "reward")
"""Fields of every action or observation."""


class ActionError(ValueError):
    """The text is no value of the field: the player's fault."""


@dataclass(frozen=True, slots=True)
class ActionField:
    """Where an action's text goes."""

    name: str | None
    """The field; None = the text is the JSON of the whole action."""
    type: str
    """The type of the field in the JSON schema; empty = unknown."""

    def action(self, text: str) -> dict[str, Any]:
        """The action that the server gets. Raises ActionError if the text is no value of the field."""
        if self.name is None:
            value = _parsed(text)
            if not isinstance(value, dict):
                raise ActionError("an action is a JSON object")
            return value
        return {self.name: self._value(text)}

    def _value(self, text: str) -> Any:
        match self.type:
            case "integer":
                return _number(text, int)
            case "number":
                return _number(text, float)
            case "boolean":
                word = text.strip().lower()
                if word not in ("true", "false"):
                    raise ActionError(f"{text!r:.40} is neither true nor false")
                return word == "true"
            case "array" | "object":
                return _parsed(text)
            case _:
                return text


def _number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text.strip())
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise ActionError(f"{text!r:.40} isn't {noun}") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise ActionError(f"{text!r:.40} isn't JSON ({fault})") from None


def action_field(action: str | None, schema: Mapping[str, Any], url: str) -> ActionField:
    """The field of `action` (None = the only required one) in the schema of a server's actions. Raises
    EnvironmentFault if there is no such field, or it isn't all that an action needs."""
    if action == "json":
        return ActionField(None, "object")
    fields = {name: field for name, field in schema.get("properties", {}).items() if name not in _ALWAYS}
    required = [name for name in schema.get("required", ()) if name not in _ALWAYS]
    if action is None and not required and len(fields) == 1:
        required = list(fields)
    if action is None and len(required) != 1:
        raise EnvironmentFault(
            f"an action of {url} has the required fields {', '.join(required) or 'none'}, of "
            f"{', '.join(fields) or 'none'}; say `action: FIELD` in env_config, or `action: json` if the "
            "answer is the whole action as JSON"
        )
    name = required[0] if action is None else action
    if name not in fields:
        raise EnvironmentFault(
            f"action: {name}: an action of {url} has the fields {', '.join(fields) or 'none'}."
            + nearest(name, list(fields))
        )
    missing = [other for other in required if other != name]
    if missing:
        raise EnvironmentFault(
            f"action: {name}: an action of {url} needs {', '.join(missing)} too; use `action: json`"
        )
    return ActionField(name, _type_of(fields[name]))


def _type_of(field: Any) -> str:
    """The type of a field; of several types, the first that isn't null."""
    if not isinstance(field, dict):
        return ""
    options = [field, *field.get("anyOf", ()), *field.get("oneOf", ())]
    types = [option.get("type") for option in options if isinstance(option, dict)]
    return next((kind for kind in types if isinstance(kind, str) and kind != "null"), "")


@dataclass(frozen=True, slots=True)
class ObservationText:
    """How the fields of an observation become a text."""

    template: str | None
    """A text with `{field}`s; None = the field, or JSON."""
    field: str | None
    """The only field that is a text; None = JSON of all fields."""

    def text(self, observation: Mapping[str, Any]) -> str:
        """What the model reads."""
        if self.template is not None:
            return self.template.format_map(_Shown(observation))
        if self.field is not None and self.field in observation:
            return _shown(observation[self.field])
        return json.dumps(
            {name: value for name, value in observation.items() if name not in _ALWAYS}, ensure_ascii=False
        )


class _Shown(dict[str, Any]):
    """Fields as a template shows them; a field that an observation lacks is empty."""

    def __getitem__(self, name: str) -> str:
        return _shown(self.get(name))


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def observation_text(template: str | None, schema: Mapping[str, Any], url: str) -> ObservationText:
    """How observations of a server are shown. Raises EnvironmentFault if the template names a field that they
    don't have."""
    fields = {name: field for name, field in schema.get("properties", {}).items() if name not in _ALWAYS}
    if template is not None:
        for name in template_fields(template):
            if fields and name not in fields:
                raise EnvironmentFault(
                    f"observation {template!r:.80}: an observation of {url} has the fields "
                    f"{', '.join(fields)}." + nearest(name, list(fields))
                )
        return ObservationText(template, None)
    texts = [name for name, field in fields.items() if _type_of(field) == "string"]
    return ObservationText(None, texts[0] if len(texts) == 1 else None)


def template_fields(template: str) -> list[str]:
    """The names in a template. Raises EnvironmentFault if it isn't a text with plain `{field}`s."""
    names = []
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as fault:
        raise EnvironmentFault(f"observation {template!r:.80} is no template: {fault}") from fault
    for _, name, format_spec, conversion in fields:
        if name is None:
            continue
        if not name.isidentifier():
            raise EnvironmentFault(f"observation {template!r:.80}: {{{name}}} isn't the name of a field")
        if format_spec or conversion:
            raise EnvironmentFault(
                f"observation {template!r:.80}: {{{name}}} has a format, but fields are texts"
            )
        names.append(name)
    return names
