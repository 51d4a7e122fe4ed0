"""The spans of an episode's trace, placed under the turns that they belong to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class ShownSpan:
    """A span as the page shows it."""

    name: str
    start_s: float
    """Seconds since the start of the episode."""
    seconds: float
    number: int | None = None
    """The number of its response, counted over all contexts of the episode; None if it belongs to no one."""
    text: str = ""
    """What it was: a call with its result, the tokens of a response, an error."""
    is_error: bool = False
    is_inner: bool = False
    """Whether it lies in another span of the same response."""
    response_ids: Sequence[int] | None = None
    """The tokens of a response, by which its turn is found."""

    def row(self, turn: int | None) -> list[Any]:
        """The span for the page, at the turn with this place in its trajectory; None = at none."""
        times = [round(self.start_s, _DIGITS), round(self.seconds, _DIGITS)]
        return [turn, int(self.is_inner), self.name, *times, self.text, int(self.is_error)]


Attempt = Sequence[ShownSpan]
"""The spans of one attempt at an episode, in the order of their start."""
SpansOfStep = Mapping[tuple[str, int], Sequence[Attempt]]
"""Id of a task and sibling → the attempts at that episode, in the order in which they ended."""


def rows_of(attempts: Sequence[Attempt], turns: Sequence[Json]) -> list[list[Any]]:
    """The spans of the attempt that has these turns. A run of an agent may give several trajectories: each
    has the spans of its own turns, and those that belong to no turn. Empty if no attempt has the turns."""
    best: dict[int, int] = {}
    spans: Attempt = ()
    for attempt in attempts:
        places = _places(attempt, turns)
        if len(places) >= len(best) and (places or not turns):
            best = places
            spans = attempt
    shown = (span for span in spans if span.number is None or span.number in best)
    return [span.row(None if span.number is None else best[span.number]) for span in shown]


def _places(attempt: Attempt, turns: Sequence[Json]) -> dict[int, int]:
    """Number of a response → the place of its turn. Equal responses are taken in their order."""
    places: dict[int, int] = {}
    responses = [span for span in attempt if span.response_ids is not None and span.number is not None]
    for place, turn in enumerate(turns):
        number = _first(turn["response_ids"], (span for span in responses if span.number not in places))
        if number is not None:
            places[number] = place
    return places


def _first(response_ids: Sequence[int], spans: Iterable[ShownSpan]) -> int | None:
    return next((span.number for span in spans if span.response_ids == response_ids), None)
