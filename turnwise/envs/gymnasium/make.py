"""Makes environments of gymnasium's registry. Importing this module imports gymnasium."""

import importlib
import os
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator
from numpy.typing import NDArray

from turnwise.envs.packages import needs
from turnwise.errors import EnvironmentFault, NotAvailableError, install_hint, nearest

Drawing = Literal["rgb_array", "ansi"]

EXTRAS = {"minigrid": "minigrid"}
"""Package of environments → the extra of turnwise that installs it."""
DRAWN_BY_PYGAME = ("gymnasium.envs.box2d", "gymnasium.envs.classic_control", "gymnasium.envs.toy_text")
"""Modules of environments that draw with pygame. They import pygame only for their first picture."""


@runtime_checkable
class HasMetadata(Protocol):
    """An environment class that declares its render modes."""

    metadata: Mapping[str, Any]


def make_gymnasium(
    env_id: str,
    kwargs: Mapping[str, Any],
    drawing: Drawing,
) -> tuple[Any, bool]:
    """The environment `env_id`, and whether it supports the render mode `drawing`. `package:id` imports the
    package. Raises EnvironmentFault if there is no such environment or it doesn't take `kwargs`;
    NotAvailableError if a package is missing."""
    package, _, name = env_id.rpartition(":")
    if package:
        _import(package)
    if name not in gymnasium.registry:
        raise EnvironmentFault(
            f"gymnasium has no environment {env_id!r}.{nearest(name, gymnasium.registry)} Another package's "
            "are written package:id, such as minigrid:MiniGrid-Empty-5x5-v0; `import gymnasium; "
            "gymnasium.pprint_registry()` lists those of gymnasium itself"
        )
    try:
        entry = gymnasium.registry[name].entry_point
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
        draws = isinstance(creator, HasMetadata) and drawing in creator.metadata.get("render_modes", ())
        arguments = dict(kwargs)
        if draws:
            arguments["render_mode"] = drawing
        # Turnwise checks the results in every episode, so gymnasium's checker would only repeat the warnings.
        env = gymnasium.make(name, disable_env_checker=True, **arguments)
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise NotAvailableError(
            f"gymnasium's {env_id} needs a package that isn't installed: {error}"
        ) from error
    except (gymnasium.error.Error, TypeError, ValueError, AssertionError) as error:
        raise EnvironmentFault(
            f"gymnasium can't make {env_id} with kwargs {dict(kwargs)!r}: {error}"
        ) from error
    return env, draws


def check_pictures(env: Any) -> None:
    """Raises NotAvailableError if an environment draws with pygame, and pygame isn't installed."""
    if any(base.__module__.startswith(DRAWN_BY_PYGAME) for base in type(env.unwrapped).__mro__):
        with needs("pygame", "gym"):
            import pygame  # noqa: F401


def draw(env: Any) -> NDArray[np.uint8] | None:
    """The environment's picture, uint8 [H, W, 3]; None if its drawing package isn't installed."""
    # pygame draws with SDL, which by default opens a window; arrays need no display.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        return np.asarray(env.render())
    except gymnasium.error.DependencyNotInstalled:
        return None


def _import(package: str) -> None:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.split(".")[0]:
            raise
        hint = " on Python's path"
        if package in EXTRAS:
            hint = f": {install_hint(EXTRAS[package])}"
        raise NotAvailableError(f"the id names the package {package!r}, and there is none{hint}") from error
