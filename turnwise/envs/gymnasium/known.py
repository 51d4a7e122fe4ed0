"""What turnwise knows about gymnasium's environments, so that a config needn't say it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.envs.packages import known_of


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about a class of environments and its subclasses."""

    actions: tuple[str, ...] = ()
    """Words for the numbers 0, 1, …; empty = the numbers."""
    rules: str = ""
    success: str = "reward"
    """The argument `success` of `GymnasiumEnv`."""
    renderers: Mapping[str, str] = field(default_factory=dict)
    """Name in a config → function of `(observation, env)`, where `env` is gymnasium's, with its wrappers. The first one is the
    default; without any, the observation space decides."""
    state_key: str = ""
    """The function that gives the state's key; "" = the observation is the key."""
    prints: bool = False
    """Whether its `reset` prints messages."""


def known_class(env: Any) -> Known:
    """The entry of the innermost environment's class, or of its first known base class."""
    table: dict[str, dict[str, Any]] = known_of("gymnasium")
    names = (f"{cls.__module__}:{cls.__qualname__}" for cls in type(env.unwrapped).__mro__)
    entry = next((table[name] for name in names if name in table), {})
    return Known(**{**entry, "actions": tuple(entry.get("actions", ()))})
