"""Walks over the keys of a config that hold no section."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from turnwise.config import AgenticConfig, SFTConfig
from turnwise.config.read.load import _models as models_in

Kind = type[AgenticConfig] | type[SFTConfig]
KINDS: tuple[Kind, ...] = (AgenticConfig, SFTConfig)
Path = tuple[str | int, ...]
TAG = "Toy"
"""The tag under which `custom_envs` is walked."""

_PLAIN: tuple[Any, ...] = (True, False, 2, 3, 0.5, 0.25, "other", ["other"], {"other": 1})


@dataclass(frozen=True, slots=True)
class Leaf:
    """One key: where it stands, and the class that declares it."""

    path: Path
    field: FieldInfo
    owner: type[BaseModel]

    @property
    def key(self) -> str:
        """The dotted path, with `<tag>` for an environment's and without the index of a list."""
        return ".".join("<tag>" if part == TAG else str(part) for part in self.path if part != 0)

    @property
    def text(self) -> str:
        """The description of the key in the schema, as one paragraph; empty where it says nothing."""
        return _texts(self.owner).get(str(self.path[-1]), "")

    def other_value(self, current: Any) -> Any:
        """A valid value that isn't the current one, of those that any key may have; None where there is
        none."""
        annotation: Any = self.field.annotation
        if self.field.metadata:
            annotation = Annotated[(annotation, *self.field.metadata)]
        adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=ConfigDict(strict=True))
        for value in (*_literals(self.field.annotation), *_PLAIN):
            try:
                if adapter.validate_python(value) != current:
                    return value
            except ValidationError:
                continue
        return None


def leaves(section: type[BaseModel], prefix: Path = ()) -> Iterator[Leaf]:
    """Every key that holds no section; `custom_envs` through one tag, lists through their first item."""
    for name, field in section.model_fields.items():
        inner = next(models_in(field.annotation), None)
        if inner is None:
            yield Leaf((*prefix, name), field, declaring(section, name))
            continue
        inside: dict[Any, Path] = {dict: (TAG,), list: (0,)}
        yield from leaves(inner, (*prefix, name, *inside.get(get_origin(field.annotation), ())))


def declaring(section: type[BaseModel], name: str) -> type[BaseModel]:
    """The class among a section's ancestors that declares the field."""
    return next(c for c in section.__mro__ if issubclass(c, BaseModel) and name in inspect.get_annotations(c))


def with_value(base: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy of the plain values in which the key at `path` has this value."""
    raw = deepcopy(base)
    place: Any = raw
    for part, following in pairwise(path):
        place = place[part] if part == 0 else place.setdefault(part, [{}] if following == 0 else {})
    place[path[-1]] = value
    return raw


def value_at(config: BaseModel, path: Path) -> Any:
    """What the key at `path` holds, None where a section around it is unset."""
    value: Any = config
    for part in path:
        if value is None or value == []:
            return None
        value = value.__dict__[str(part)] if isinstance(value, BaseModel) else value[part]
    return value


def _literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    for argument in get_args(annotation):
        yield from _literals(argument)


@cache
def _texts(section: type[BaseModel]) -> dict[str, str]:
    """The strings below the fields of a class, by field."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node, following in pairwise(definition.body):
        match node, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found
