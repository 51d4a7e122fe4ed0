"""The base class of text environments."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from turnwise.types import Observation, Reduction

Step = tuple[str | Observation, float, bool, bool, dict[str, Any]]


class TextEnv(ABC):
    """A synchronous environment: `reset` and `step` are its own, the rest has defaults.

    Subclassing is a convenience: anything of the shape of `protocols.Env` is an environment. One whose observation
    doesn't tell its true state adds `state_key()`."""

    metric_reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType({})
    relays_foreign_text: ClassVar[bool] = False
    """Whether observations hold foreign text (a web page, a data set, a player's words). Special tokens in it then stay
    ordinary text, unless the config says `encode_special_tokens: true`."""

    shows_pictures: bool = False
    """Whether this environment's observations hold pictures, which a model of texts can't see."""

    @abstractmethod
    def reset(self, *, seed: int | None = None) -> tuple[str | Observation, dict[str, Any]]:
        """Starts an episode that follows from `seed` alone."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """`(observation, reward, terminated, truncated, info)` of one action; "" is an action that couldn't be parsed."""

    def render(self) -> Any:
        """A picture for people, uint8 [H, W, 3], or None."""
        return None

    def close(self) -> None:
        """Frees the environment's resources; called once per episode, on every path."""
        return None
