"""Turnwise's knowledge of gymnasium's environments, which a config then needn't repeat."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from turnwise.envs.gymnasium import cliff_walking, minigrid, taxi

Renderer = Callable[[Any, Any], str]
"""`(observation, env)` → text, where `env` is gymnasium's, with its wrappers."""


@dataclass(frozen=True, slots=True)
class Known:
    """A class of environments, with the classes below it."""

    actions: tuple[str, ...] = ()
    """Words for the numbers 0, 1, …; empty = the numbers."""
    rules: str = ""
    success: str = "reward"
    """The argument `success` of `GymnasiumEnv`."""
    renderers: Mapping[str, Renderer] = field(default_factory=dict)
    """Renderers by their names in a config. The first is the default; none = by the observation's space."""
    state_key: Callable[[Any], Hashable] | None = None
    """Names the state of gymnasium's environment; None = the observation."""
    prints: bool = False
    """Whether its `reset` prints messages."""


KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        "gymnasium.envs.toy_text.taxi:TaxiEnv": Known(taxi.ACTIONS, taxi.RULES, renderers={"taxi": taxi.words}),
        "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv": Known(
            cliff_walking.ACTIONS,
            cliff_walking.RULES,
            success="terminated",
            renderers={"cliff_walking": cliff_walking.words},
        ),
        "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv": Known(("left", "down", "right", "up")),
        "gymnasium.envs.toy_text.blackjack:BlackjackEnv": Known(
            ("stick", "hit"), "Blackjack. You see your sum, the dealer's card, and 1 if you hold an ace that can count 11."
        ),
        "gymnasium.envs.classic_control.cartpole:CartPoleEnv": Known(
            ("left", "right"),
            "Push the cart so that its pole stays upright. You see the cart's position and speed, the pole's angle and speed.",
            success="truncated",
        ),
        "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": Known(
            ("left", "wait", "right"),
            "Swing the car up the hill on the right, to position 0.5. You see its position and its speed.",
            success="terminated",
        ),
        "gymnasium.envs.classic_control.acrobot:AcrobotEnv": Known(
            ("left", "wait", "right"),
            "Swing the end of two linked bars above the line. You see cosine and sine of both angles, and both speeds.",
            success="terminated",
        ),
        "minigrid.minigrid_env:MiniGridEnv": Known(
            minigrid.ACTIONS,
            minigrid.RULES,
            renderers={"minigrid": minigrid.partial_view, "minigrid_full": minigrid.full_view},
            state_key=minigrid.state_key,
            prints=True,
        ),
    }
)
"""The known environments, by `module:Class`."""


def known_of(env: Any) -> Known:
    """The entry of the innermost environment's class, or of its first known base class."""
    names = (f"{cls.__module__}:{cls.__qualname__}" for cls in type(env.unwrapped).__mro__)
    return next((KNOWN[name] for name in names if name in KNOWN), Known())
