"""The contract of what hears the metrics and texts of a step."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol


class StepTexts(NamedTuple):
    """Texts that trackers get with a step's metrics: sentences on the run's health, by condition, and sample
    trajectories."""

    health: Mapping[str, str] = MappingProxyType({})
    brief: str = ""
    """A few lines of the best sample, for people who watch."""
    samples: str = ""


NO_TEXTS = StepTexts()


class Tracker(Protocol):
    """Receives the metrics of a step, already reduced, and its texts."""

    def log(self, step: int, metrics: Mapping[str, float], texts: StepTexts = NO_TEXTS) -> None: ...

    def close(self) -> None: ...
