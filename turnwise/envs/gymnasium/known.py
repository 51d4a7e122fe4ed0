"""What turnwise knows about gymnasium's environments, so that a config needn't state it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.envs.packages import known_of


@dataclass(frozen=True, slots=True)
class Known:
    """What turnwise knows about a class of environments and its subclasses."""

    actions: Sequence[str] = ()
    """Words of the actions 0, 1, …; empty = their numbers are the words."""
    rules: str = ""
    """Text that opens the first prompt."""
    success: str = "reward"
    """Default of the argument `success` of `GymnasiumEnv`."""
    renderers: Mapping[str, str] = field(default_factory=dict)
    """Name → `module:function` of `(observation, env)`, where `env` has gymnasium's wrappers. The first is
    the default."""
    state_key: str = ""
    """`module:function` of `env` that returns a key of the state; "" = the observation is the key."""
    prints: bool = False
    """Whether the environment's `reset` prints messages."""


def known_class(env: Any) -> Known:
    """What is known about the environment's class (without wrappers), else about its first known base class,
    else defaults."""
    table: dict[str, dict[str, Any]] = known_of("gymnasium")
    for cls in type(env.unwrapped).__mro__:
        name = f"{cls.__module__}:{cls.__qualname__}"
        if name in table:
            return Known(**table[name])
    return Known()
