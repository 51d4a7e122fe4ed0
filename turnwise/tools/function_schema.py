"""A function's signature as a tool: the schema of its parameters, and a call's JSON arguments as the types of
its hints."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from turnwise.errors import ConfigError, ToolError

_PLAIN = {int, float, str, bool, type(None), list, dict, tuple, Any}
"""Hints whose values are JSON values."""
_KINDS_OUTSIDE = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
"""Kinds of parameters that a call, which names its arguments, can't give."""
_TYPED_PARAMETER = re.compile(r"(?m)^(\s+\*{0,2}\w+) ?\([^\n:]*\):")
"""A parameter in a docstring with its type in parentheses, as Google's style writes it; transformers reads it
without one."""


class FunctionSignature:
    """The parameters of a function, of a method, of an object with `__call__`, or of a `partial` of one of
    them. Those that a `partial` has bound, `*args` and `**kwargs` aren't among them. Raises ConfigError if
    the function can't be a tool, or its signature or docstring doesn't say enough for a schema."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = name_of(function)
        self._described = _described(function)
        self._parameters = self._named_parameters(function)
        self._hints = self._resolved_hints()
        self._adapters: dict[str, TypeAdapter[Any]] = {}
        for name, hint in self._hints.items():
            adapter = None if _is_plain(hint) else self._adapter(name, hint)
            if adapter is not None:
                self._adapters[name] = adapter

    def schema(self) -> dict[str, Any]:
        """The schema in OpenAI's form."""
        # Imported here, since `turnwise config` reads settings of tools without importing transformers.
        from transformers.utils import get_json_schema
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

        try:
            schema: dict[str, Any] = get_json_schema(self._stand_in())
        except (DocstringParsingException, TypeHintParsingException, TypeError, ValueError) as fault:
            raise self._lacking(str(fault)) from fault
        properties = schema["function"]["parameters"]["properties"]
        for name, adapter in self._adapters.items():
            properties[name] = {**self._schema_of(name, adapter), **properties[name]}
        # No family's template shows what a function returns.
        schema["function"].pop("return", None)
        return schema

    def bound(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments by position and by name, of the types that the hints name. Raises ToolError if one
        has no such form."""
        values = {name: self._converted(name, value) for name, value in arguments.items()}
        by_position = []
        for parameter in self._parameters:
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                by_position.append(values.pop(parameter.name, parameter.default))
        return by_position, values

    def _converted(self, name: str, value: Any) -> Any:
        adapter = self._adapters.get(name)
        if adapter is None:
            return value
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            [problem, *_] = error.errors()
            steps = (name, *problem["loc"])
            place = ".".join(map(str, steps))
            raise ToolError(f"{place}: {problem['msg']}") from error

    def _named_parameters(self, function: Callable[..., Any]) -> list[inspect.Parameter]:
        if inspect.isgeneratorfunction(self._described) or inspect.isasyncgenfunction(self._described):
            raise ConfigError(
                f"the tool {self.name} yields its results one by one; a call has one result, so return it"
            )
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as fault:
            raise self._lacking(str(fault)) from fault
        bound = function.keywords if isinstance(function, partial) else {}
        unbound = [parameter for parameter in parameters if parameter.name not in bound]
        nameable = [parameter for parameter in unbound if parameter.kind not in _KINDS_OUTSIDE]
        if parameters and not nameable and not bound:
            raise ConfigError(
                f"the tool {self.name} takes {' and '.join(map(str, parameters))}, and a call names its "
                "arguments: write the parameters out"
            )
        if nameable and _is_object(nameable[0]):
            example = self._described.__qualname__.replace(".", "(…).", 1)
            raise ConfigError(
                f"the tool {self.name} is a method without its object ({nameable[0].name} is its first "
                f"parameter): give the method of an object, such as {example}"
            )
        return nameable

    def _resolved_hints(self) -> dict[str, Any]:
        try:
            hints = get_type_hints(self._described)
        except (NameError, TypeError, SyntaxError) as fault:
            raise self._lacking(str(fault)) from fault
        names = [parameter.name for parameter in self._parameters]
        return {name: hints[name] for name in names if name in hints}

    def _adapter(self, name: str, hint: Any) -> TypeAdapter[Any] | None:
        try:
            return TypeAdapter(hint)
        except (PydanticUserError, TypeError) as fault:
            if isinstance(fault, PydanticUserError) and fault.code == "typed-dict-version":
                return None  # before Python 3.12, a TypedDict is only shown as an object
            raise self._no_json(name, hint) from fault

    def _schema_of(self, name: str, adapter: TypeAdapter[Any]) -> dict[str, Any]:
        try:
            schema = adapter.json_schema()
        except (PydanticUserError, PydanticSerializationError) as fault:
            raise self._no_json(name, self._hints[name]) from fault
        try:
            inlined: dict[str, Any] = _inlined(schema, schema.get("$defs") or {})
        except RecursionError as fault:
            raise ConfigError(
                f"the tool {self.name}: the type of {name} holds itself, which few chat templates show: let "
                "it hold a dict"
            ) from fault
        return inlined

    def _stand_in(self) -> Callable[..., Any]:
        """A function with the same name, docstring and parameters, of which transformers makes a schema."""

        def stand_in() -> None: ...

        documentation = inspect.getdoc(self._described) or ""
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in self._parameters
        ]
        stand_in.__name__ = self.name
        stand_in.__doc__ = _TYPED_PARAMETER.sub(r"\1:", documentation)
        stand_in.__annotations__ = self._hints | dict.fromkeys(self._adapters, Any)
        stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return stand_in

    def _lacking(self, problem: str) -> ConfigError:
        return ConfigError(
            f"the tool {self.name}: {problem}; a function that is a tool has type hints, and a docstring "
            "with `Args:` that describes each parameter"
        )

    def _no_json(self, name: str, hint: Any) -> ConfigError:
        return ConfigError(
            f"the tool {self.name}: JSON has no values for {name}: {hint}; use a text, a number, a "
            "list, a dict, an enum, a dataclass or a pydantic model"
        )


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, of the one that a `partial` calls, or of the class of an object with
    `__call__`."""
    match _described(function):
        case MethodType(__func__=called, __self__=owner) if called.__name__ == "__call__":
            return type(owner).__name__
        case described:
            return str(described.__name__)


def _described(function: Callable[..., Any]) -> Any:
    """The function or method that has the hints and the docstring."""
    while isinstance(function, partial):
        function = function.func
    match function:
        case object(__name__=str()):
            return function
    return function.__call__


def _is_object(parameter: inspect.Parameter) -> bool:
    """Whether a method's parameter stands for its object."""
    return parameter.name in ("self", "cls") and parameter.annotation is inspect.Parameter.empty


def _is_plain(hint: Any) -> bool:
    """Whether transformers writes the schema of this hint, and its values are JSON values."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is None:
        return any(hint is plain for plain in _PLAIN)
    if origin is Literal:
        return all(type(value) in _PLAIN for value in inner)
    if origin is tuple:
        return len(inner) > 1 and all(map(_is_plain, inner))
    is_composed = origin in (Union, UnionType, list, dict)
    return is_composed and all(map(_is_plain, inner))


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema with definitions in the place of references to them, since few chat templates show `$defs`,
    and without titles, which repeat names."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str):
        _, _, name = reference.rpartition("/")
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**definitions[name], **siblings}
    is_dropped = {"$defs": True, "title": isinstance(schema.get("title"), str)}
    return {key: _inlined(value, definitions) for key, value in schema.items() if not is_dropped.get(key)}
