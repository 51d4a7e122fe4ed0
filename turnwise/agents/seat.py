"""What an agent of the gateway gets, and what it hands back."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from turnwise.agents.played_env import PlayedEnv
from turnwise.errors import EnvironmentFault

_FORMS = "None, the answer (a text), a score (a number), or a mapping with answer, score, metrics"


class Seat(NamedTuple):
    """An episode as the one who plays it sees it."""

    episode: str
    """Names the episode, for messages."""
    url: str
    """The address of the session, which ends in its key, without `/v1`."""
    key: str
    model: str
    task: Mapping[str, Any]
    """JSON: id, split, seed, prompt, and the columns of the row."""
    env: PlayedEnv | None
    """The environment, reset; None for a row."""

    @property
    def base_url(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a player hands back."""

    answer: str | None = None
    """None = the last delivered response of the first conversation."""
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Player(Protocol):
    """Plays episodes over HTTP."""

    @property
    def label(self) -> str:
        """Names the setting and what it names, for messages."""

    async def play(self, seat: Seat, workdir: Path) -> Outcome:
        """Plays one episode. When it is cancelled, the session has ended, and the player has a moment to
        end."""


def read_outcome(value: Any, label: str) -> Outcome:
    """What a function returned. Raises EnvironmentFault for anything that is no outcome.

    >>> read_outcome({"answer": "4", "score": 1}, "play")
    Outcome(answer='4', score=1.0, metrics={})
    """
    if value is None:
        return Outcome()
    if isinstance(value, str):
        return Outcome(answer=value)
    if isinstance(value, Real):
        return Outcome(score=_number(value, label, "the score"))
    if not isinstance(value, Mapping):
        raise EnvironmentFault(f"{label} returned a {type(value).__name__}; it must return {_FORMS}")
    unknown = [str(name) for name in value if name not in ("answer", "score", "metrics")]
    if unknown:
        raise EnvironmentFault(f"{label} returned a mapping with {unknown[0]!r}; it must return {_FORMS}")
    answer = value.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise EnvironmentFault(
            f"{label} returned an answer of type {type(answer).__name__}; it must be a text"
        )
    score = value.get("score")
    if score is not None:
        score = _number(score, label, "the score")
    metrics = value.get("metrics") or {}
    if not isinstance(metrics, Mapping):
        raise EnvironmentFault(f"{label} returned metrics {metrics!r}; they must be numbers by name")
    numbers = {str(name): _number(metric, label, f"the metric {name!r}") for name, metric in metrics.items()}
    return Outcome(answer, score, numbers)


def outcome_of_line(line: str, label: str) -> Outcome:
    """The outcome in the last line that a command writes: a JSON object, or the answer as text.

    >>> outcome_of_line('{"score": 0.5}', "command"), outcome_of_line("42", "command").answer
    (Outcome(answer=None, score=0.5, metrics={}), '42')
    """
    if line.startswith("{"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return Outcome(answer=line)
        return read_outcome(value, label)
    return Outcome(answer=line or None)


def _number(value: Any, label: str, name: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise EnvironmentFault(f"{label}: {name} is {value!r}; it must be a finite number")
    return float(value)
