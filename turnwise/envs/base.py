"""The base class of text environments."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from turnwise.types import Observation, Reduction, derive_seed

Step = tuple[str | Observation, float, bool, bool, dict[str, Any]]


def episode_seed(seed: int | None, last_seed: int) -> int:
    """The seed of an episode: `seed` or, without one, a seed derived from the last episode's."""
    if seed is None:
        return derive_seed(last_seed, "next")
    return seed


class TextEnv(ABC):
    """A synchronous environment. A subclass defines `reset` and `step`, and `state_key()` (a hashable key of
    the state) if observations don't show the whole state. Any other class with the members of `protocols.Env`
    is an environment, too."""

    metric_reductions: ClassVar[Mapping[str, Reduction]] = MappingProxyType({})
    relays_foreign_text: ClassVar[bool] = False
    """Whether observations hold text that others wrote (a web page, a data set, a player's words). Special
    tokens spelt out in observations then stay ordinary text, unless the config sets `encode_special_tokens:
    true`."""
    shows_pictures: bool = False
    """Whether this environment's observations hold pictures, which a text model can't see."""

    @abstractmethod
    def reset(self, *, seed: int | None = None) -> tuple[str | Observation, dict[str, Any]]:
        """Starts an episode and returns `(observation, info)`. Everything random in the episode follows from
        `seed`."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Plays an action; "" means that none could be parsed. Returns `(observation, reward, terminated,
        truncated, info)`."""

    def render(self) -> Any:
        """What people see: a picture (uint8 [H, W, 3]), a string, or None."""
        return None

    def close(self) -> None:
        """Frees the environment's resources. Called once per episode, however the episode ends."""
        return None
