"""Finds the class of an `env_type` and makes environments. A class is imported at its first use."""

import inspect
from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from turnwise.envs.base import TextEnv
from turnwise.errors import EnvironmentFault, nearest
from turnwise.protocols import Env
from turnwise.runtime.entry_points import load_class
from turnwise.spec import ENVS
from turnwise.types import Split

# `register` writes into the first map, which lies over `spec.ENVS`.
_entry_points = ChainMap[str, str]({}, ENVS)
# Looking a constructor's signature up takes as long as making many environments.
_signature = lru_cache(inspect.signature)


def register(env_type: str, entry_point: str) -> None:
    """Registers `module:Class` as `env_type`. Raises EnvironmentFault for another form, or if another class
    has this name."""
    if not all(entry_point.partition(":")):
        raise EnvironmentFault(f"entry point {entry_point!r} must be 'module:Class'")
    registered = _entry_points.get(env_type, entry_point)
    if registered != entry_point:
        raise EnvironmentFault(
            f"env_type {env_type!r} is {registered} already; register {entry_point} by another name"
        )
    _entry_points[env_type] = entry_point


def env_class(env_type: str) -> type:
    """The class of a name or `module:Class`. Raises EnvironmentFault if it is unknown."""
    names = sorted(_entry_points)
    if env_type in _entry_points:
        entry_point = _entry_points[env_type]
    elif ":" in env_type:
        entry_point = env_type
    else:
        raise EnvironmentFault(
            f"unknown env_type {env_type!r}; known are {', '.join(names)}, and any class as 'module:Class'."
            + nearest(env_type, names)
        )
    return load_class(entry_point, "env_type", EnvironmentFault)


def takes_split(env_type: str) -> bool:
    """Whether the constructor of the class, or of a base class, has a parameter `split`. A base class's
    counts only if all constructors before it have `**options`, which they are assumed to pass on."""
    return _takes_split(env_class(env_type))


@lru_cache
def _takes_split(cls: type) -> bool:
    constructors = [vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base)]
    for signature in (_signature(cls), *map(inspect.signature, constructors[1:])):
        if "split" in signature.parameters:
            return True
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return False
    return False


def relays_foreign_text(env_type: str) -> bool:
    """Whether the class of an `env_type` sets `TextEnv.relays_foreign_text`."""
    cls = env_class(env_type)
    return issubclass(cls, TextEnv) and cls.relays_foreign_text


def make_env(env_type: str, env_config: Mapping[str, Any], split: Split) -> Env:
    """Makes an environment: see `bound_class`."""
    env: Env = bound_class(env_type, env_config, split)()
    return env


def bound_class(env_type: str, env_config: Mapping[str, Any], split: Split) -> Callable[[], Env]:
    """The class of an `env_type` with the arguments of `env_config`, plus `split` if the class has this
    parameter and the config doesn't set it. Raises EnvironmentFault if the class doesn't accept the
    arguments."""
    cls = env_class(env_type)
    arguments = dict(env_config)
    if takes_split(env_type):
        arguments = {"split": split, **env_config}
    signature = _signature(cls)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        parameters = signature.parameters.values()
        allowed = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        unknown = next((name for name in arguments if name not in allowed), "")
        raise EnvironmentFault(
            f"env_config of {env_type!r}: {error}; {cls.__name__} takes "
            f"{', '.join(allowed) or 'no arguments'}." + nearest(unknown, allowed)
        ) from error
    return partial(cls, **arguments)
