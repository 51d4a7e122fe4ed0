"""What the clients of an episode may ask for, and what is said of the rest."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from turnwise.errors import nearest
from turnwise.gateway.dialect import GatewayError

logger = logging.getLogger(__name__)

ModelUse = Literal["trained", "untrained"]
_WILDCARDS = "*?["


@dataclass(frozen=True, slots=True)
class SessionRules:
    """What clients may ask for."""

    models: Mapping[str, ModelUse]
    """Name of a model, or a pattern of names, → whether its answers are trained on. The first that fits
    counts. All names are answered by the policy."""
    max_requests: int = 16
    """Maximum requests of one session at once."""
    max_choices: int = 8
    """Maximum `n` of a request."""
    is_strict: bool = False
    """Whether a request is refused that asks for what can't be enforced."""
    takes_temperature: bool = False
    """Whether the client's temperature replaces the run's."""

    @property
    def names(self) -> list[str]:
        """The names of models that aren't patterns."""
        return [name for name in self.models if not any(mark in name for mark in _WILDCARDS)]

    def is_trained(self, model: str) -> bool:
        """Whether the answers of a model are trained on. Raises GatewayError if there is no such model."""
        for pattern, use in self.models.items():
            if fnmatchcase(model, pattern):
                return use == "trained"
        raise GatewayError(
            f"there is no model {model[:80]!r}; the names are {', '.join(self.models)}."
            f"{nearest(model, self.names)} agent.models sets them",
            "model_not_found",
            param="model",
        )


@dataclass(slots=True)
class Notices:
    """Says a thing once a run, as a warning; later only to those who debug."""

    _said: set[str] = field(default_factory=set)

    def say(self, kind: str, sentence: str, *values: object) -> None:
        level = logging.DEBUG if kind in self._said else logging.WARNING
        self._said.add(kind)
        logger.log(level, sentence, *values)
