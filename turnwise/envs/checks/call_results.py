"""The visible results of one call of an environment, for comparing two episodes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from turnwise.envs.contract import PROMPT_KEYS, StepResult
from turnwise.types import Observation

_MAX_SHOWN = 40


class CallResult(NamedTuple):
    """All that an agent, or credit, gets to see of one call."""

    text: str
    images: tuple[bytes, ...]
    prompt: tuple[str, ...]
    """The values of `PROMPT_KEYS`."""
    reward: float
    is_terminated: bool
    is_truncated: bool
    metrics: tuple[tuple[str, float], ...]
    state_key: Hashable

    @property
    def is_over(self) -> bool:
        return self.is_terminated or self.is_truncated


def start_result(observation: Observation, info: Mapping[str, Any], state_key: Hashable = None) -> CallResult:
    """The visible result of a `reset`."""
    return CallResult(observation.text, _images(observation), _prompt(info), 0.0, False, False, (), state_key)


def step_result(step: StepResult, state_key: Hashable = None) -> CallResult:
    """The visible result of a `step`."""
    return CallResult(
        text=step.observation.text,
        images=_images(step.observation),
        prompt=_prompt(step.info),
        reward=step.reward,
        is_terminated=step.is_terminated,
        is_truncated=step.is_truncated,
        metrics=tuple(sorted(step.metrics.items())),
        state_key=state_key,
    )


class Mismatch(NamedTuple):
    """The first difference of two episodes."""

    name: str
    """The first differing field of `CallResult`; "end" if only one episode is over."""
    told: str
    """The mismatch in a few words, with turn and values."""


def first_difference(expected: Sequence[CallResult], got: Sequence[CallResult]) -> Mismatch | None:
    """The first difference of two episodes, None if they are equal.

    >>> start = start_result(Observation("P _"), {})
    >>> first_difference([start], [start._replace(text="_ P")])
    Mismatch(name='text', told="at the start: text 'P _' and '_ P'")
    """
    for turn, (one, other) in enumerate(zip_longest(expected, got)):
        if one == other:
            continue
        where = f"at turn {turn}" if turn else "at the start"
        if one is None or other is None:
            return Mismatch("end", f"{where}: one episode is over and the other goes on")
        name, first, second = next((name, a, b) for name, a, b in zip(CallResult._fields, one, other, strict=True) if a != b)
        if name == "images":
            return Mismatch(name, f"{where}: the pictures differ")
        return Mismatch(name, f"{where}: {name} {' and '.join(_shown(first, second))}")
    return None


def _images(observation: Observation) -> tuple[bytes, ...]:
    return tuple(media.data.tobytes() for media in observation.media)


def _prompt(info: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(info.get(key, "")) for key in PROMPT_KEYS)


def _shown(first: object, second: object) -> list[str]:
    """Two different values; of long ones, the part where they begin to differ."""
    texts = [repr(first), repr(second)]
    num_same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    start = 0 if max(map(len, texts)) <= _MAX_SHOWN else max(num_same - _MAX_SHOWN // 2, 0)
    return [f"{'…' if start else ''}{t[start : start + _MAX_SHOWN]}{'…' if len(t) > start + _MAX_SHOWN else ''}" for t in texts]
