"""The base of every section of a config: a strict, frozen pydantic model in which `null` means "not set" for
most keys."""

import sys
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from turnwise.errors import nearest

LARGEST = 2**63 - 1
"""The largest whole number in a config, since torch, numpy and saved files store integers in 64 bits."""
Count = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveCount = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""A wait in seconds, above 0 and at most 1e9, since the system's clocks overflow beyond that."""
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]

LONGEST_PART, LONGEST_PATH = 255, 4095
"""Maximum bytes of a file's name, and of a path."""


def _is_named(name: str) -> str:
    if not name.strip():
        raise ValueError("is empty; give it a name, or leave it out")
    if (
        any(len(part.encode()) > LONGEST_PART for part in name.split("/"))
        or len(name.encode()) > LONGEST_PATH
    ):
        raise ValueError(
            f"is too long: the system takes {LONGEST_PART} bytes between slashes and {LONGEST_PATH:,} in all"
        )
    return name


Name = Annotated[str, AfterValidator(_is_named)]
"""A string that isn't empty and isn't too long for a path."""

Names = Annotated[list[Name], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""A list of names; a single name stands for a list of one."""


def is_entry_point(name: str) -> bool:
    """Whether the name has the form `module:Class` or `module:function`. Raises ValueError for Python's own
    modules."""
    module, _, attribute = name.partition(":")
    if attribute and module.split(".")[0] in sys.stdlib_module_names:
        raise ValueError(
            f"{name!r} names a module of Python itself; your own plug-in needs a module with another name"
        )
    return all(
        part.isidentifier() for part in [*module.split("."), *attribute.split(".")]
    )  # an attribute may be Class.method


def aliased(names: Mapping[str, str]) -> BeforeValidator:
    """A validator that replaces the aliases in `names` by the names that they stand for."""
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


def derived() -> Any:
    """The default of a field that `resolve` fills from the rest of the config, unless the user sets it."""
    return Field(default=None)


class OneOf:
    """A validator that accepts the given names and, if `own` is set, a user's entry point, of the form that
    `own` shows."""

    def __init__(self, names: Iterable[str], *, own: str = "") -> None:
        self.names = tuple(names)
        self.own = own

    def __call__(self, name: str) -> str:
        if name in self.names or (self.own and is_entry_point(name)):
            return name
        raise ValueError(f"{name!r} isn't one of {self}.{nearest(name, self.names)}")

    def __str__(self) -> str:
        return ", ".join(self.names) + (f", or your own as {self.own}" if self.own else "")


class Section(BaseModel):
    """Base of all sections. Unknown keys and wrong types are errors. `null` means the default, unless the
    type allows None."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    _derived: dict[str, Any] = PrivateAttr(default_factory=dict)
    """The value that `fill` gave to each key, or would have given if the user hadn't set it."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        strict = {
            key for key, field in cls.model_fields.items() if NoneType not in get_args(field.annotation)
        }
        return {key: value for key, value in data.items() if value is not None or key not in strict}

    def fill(self, **values: Any) -> None:
        """Sets keys that the user did not set. `is_set` and `model_fields_set` don't count them as set."""
        self._derived.update(values)
        for name, value in values.items():
            if name not in self.model_fields_set:
                object.__setattr__(self, name, value)

    def is_set(self, key: str) -> bool:
        """Whether the user set the dotted `key` of this section. Keys in a plain mapping count as set if the
        mapping is set."""
        first, _, rest = key.partition(".")
        if first not in self.model_fields_set:
            return False
        value = self.__dict__[first]
        return value.is_set(rest) if rest and isinstance(value, Section) else True

    def departs(self, key: str) -> bool:
        """Whether the user gave the dotted `key`, or a key below it, a value that differs from its default or
        derived value."""
        first, _, rest = key.partition(".")
        if first not in self.model_fields_set:
            return False
        value = self.__dict__[first]
        default = self._derived.get(
            first, type(self).model_fields[first].get_default(call_default_factory=True)
        )
        if isinstance(value, Section) and rest:
            return value.departs(rest)
        if isinstance(value, Section) and default is not None:
            return any(value.departs(name) for name in value.model_fields_set)
        return bool(value != default)
