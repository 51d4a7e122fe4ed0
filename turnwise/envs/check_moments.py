"""What can be seen of an environment after one call, so that two episodes can be compared."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from turnwise.envs.contract import StepResult
from turnwise.errors import EnvironmentFault
from turnwise.protocols import Env, HasStateKey
from turnwise.types import Observation

PROMPT_KEYS = ("env_instruction", "suffix")
"""What prompts take from `info`."""
_MAX_SHOWN = 40


class Moment(NamedTuple):
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


def start_moment(observation: Observation, info: Mapping[str, Any], state_key: Hashable = None) -> Moment:
    """What a `reset` shows."""
    return Moment(observation.text, _images(observation), _prompt(info), 0.0, False, False, (), state_key)


def step_moment(step: StepResult, state_key: Hashable = None) -> Moment:
    """What a `step` shows."""
    return Moment(
        text=step.observation.text,
        images=_images(step.observation),
        prompt=_prompt(step.info),
        reward=step.reward,
        is_terminated=step.is_terminated,
        is_truncated=step.is_truncated,
        metrics=tuple(sorted(step.metrics.items())),
        state_key=state_key,
    )


def read_state_key(env: Env) -> Hashable:
    """The environment's own name of its state, None where it gives none.

    Raises:
        EnvironmentFault: the name isn't hashable.
    """
    key = env.state_key() if isinstance(env, HasStateKey) else None
    try:
        hash(key)
    except TypeError as error:
        raise EnvironmentFault(f"{type(env).__name__}: state_key() gave {key!r}; it must be hashable ({error})") from error
    return key


def first_difference(expected: Sequence[Moment], got: Sequence[Moment]) -> str | None:
    """Where two episodes part, in a few words; None where they are equal.

    >>> start = start_moment(Observation("P _"), {})
    >>> first_difference([start], [start._replace(text="_ P")])
    "at the start: text 'P _' and '_ P'"
    """
    for turn, (one, other) in enumerate(zip_longest(expected, got)):
        if one == other:
            continue
        where = f"at turn {turn}" if turn else "at the start"
        if one is None or other is None:
            return f"{where}: one episode is over and the other goes on"
        names = [name for name, a, b in zip(Moment._fields, one, other, strict=True) if a != b]
        name = names[0]
        if name == "images":
            return f"{where}: the pictures differ"
        first, second = (_short(moment[Moment._fields.index(name)]) for moment in (one, other))
        return f"{where}: {name} {first} and {second}"
    return None


def _images(observation: Observation) -> tuple[bytes, ...]:
    return tuple(media.data.tobytes() for media in observation.media)


def _prompt(info: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(info.get(key, "")) for key in PROMPT_KEYS)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
