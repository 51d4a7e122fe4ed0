"""Checks the results of every `reset` and `step`, so that wrong types and NaN never reach training."""

import numbers
import reprlib
from collections.abc import Callable, Hashable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, get_args

import numpy as np

from turnwise.errors import EnvironmentFault, nearest
from turnwise.protocols import Env, HasStateKey
from turnwise.types import MAX_ABS, Media, Observation, Reduction, Trajectory

PROMPT_KEYS = ("env_instruction", "suffix")
"""Keys of `info` whose texts go into prompts."""

_REDUCTIONS: dict[Reduction, Callable[[list[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "min": min,
    "last": itemgetter(-1),
}


class StepResult(NamedTuple):
    """The checked result of one `step`."""

    observation: Observation
    reward: float
    is_terminated: bool
    is_truncated: bool
    info: Mapping[str, Any]
    metrics: dict[str, float]


def check_shape(env: Env) -> None:
    """Raises EnvironmentFault if a required member is missing, or `metric_reductions` isn't valid."""
    name = type(env).__name__
    required = ("reset", "step", "close", "metric_reductions")
    missing = [member for member in required if not hasattr(env, member)]
    if missing:
        raise EnvironmentFault(
            f"{name} isn't an environment, as it has no {', '.join(missing)}; subclass "
            "turnwise.envs.base:TextEnv, or see the contract in docs/environments.md"
        )
    if not isinstance(env.metric_reductions, Mapping):
        raise EnvironmentFault(
            f"{name}.metric_reductions is {_shape(env.metric_reductions)}; it must be a dict"
        )
    for metric, reduction in env.metric_reductions.items():
        if reduction not in get_args(Reduction):
            raise EnvironmentFault(
                f"{name}: metric {metric!r} has reduction {reduction!r}; allowed: "
                f"{', '.join(get_args(Reduction))}"
            )


def read_reset(result: Any, env_name: str) -> tuple[Observation, Mapping[str, Any]]:
    """Checks and returns the `(observation, info)` of a `reset`. Raises EnvironmentFault if it breaks the
    contract."""
    label = f"environment {env_name}, reset"
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvironmentFault(f"{label}: got {_shape(result)}; reset returns the tuple (observation, info)")
    observation, info = result
    return _observation(observation, label), _info(info, label)


def read_step(
    result: Any,
    env_name: str,
    turn: int,
    reductions: Mapping[str, Reduction],
) -> StepResult:
    """Checks what `step` returned in turn `turn` (from 1). Raises EnvironmentFault if it breaks the
    contract."""
    label = f"environment {env_name}, turn {turn}"
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvironmentFault(
            f"{label}: got {_shape(result)}; step returns the tuple (observation, reward, terminated, "
            "truncated, info)"
        )
    observation, reward, terminated, truncated, info = result
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, (bool, np.bool_)):
            raise EnvironmentFault(f"{label}: {name} is {value!r}; it must be True or False")
    info = _info(info, label)
    return StepResult(
        observation=_observation(observation, label),
        reward=_number(reward, f"{label}: the reward"),
        is_terminated=bool(terminated),
        is_truncated=bool(truncated),
        info=info,
        metrics=_metrics(info.get("metrics", {}), label, reductions),
    )


def read_state_key(env: Env) -> Hashable:
    """`state_key()` of an environment; None if it has no such method."""
    if not isinstance(env, HasStateKey):
        return None
    return ask_state_key(env)


def ask_state_key(env: HasStateKey) -> Hashable:
    """`env.state_key()`. Raises EnvironmentFault if the key isn't hashable."""
    return checked_key(env.state_key(), type(env).__name__)


def checked_key(key: Any, class_name: str) -> Hashable:
    """A state key. Raises EnvironmentFault if it isn't hashable."""
    try:
        hash(key)
    except TypeError as error:
        raise EnvironmentFault(
            f"{class_name}: state_key() gave {key!r}; it must be hashable ({error})"
        ) from error
    result: Hashable = key
    return result


def is_picture(value: Any) -> bool:
    """Whether a value is an RGB array: uint8 [H, W, 3]."""
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] == (3,)


def check_numbers(trajectory: Trajectory, label: str) -> None:
    """Turns a trajectory's rewards and metrics into floats. Raises EnvironmentFault unless all are numbers up
    to ±`MAX_ABS`."""
    for number, turn in enumerate(trajectory.turns, start=1):
        turn.reward = _number(turn.reward, f"{label}, turn {number}: the reward")
        turn.metrics = {
            name: _number(value, f"{label}, turn {number}: metric {name!r}")
            for name, value in turn.metrics.items()
        }
    for values in (trajectory.outcome_rewards, trajectory.metrics):
        for name, value in values.items():
            values[name] = _number(value, f"{label}: {name!r}")


def reduce_metric(values: list[float], reduction: Reduction) -> float:
    """Combines the values of an episode's steps (at least one, in order) into one number.

    >>> reduce_metric([0.0, 1.0, 1.0, 0.0], "mean"), reduce_metric([0.0, 1.0], "last")
    (0.5, 1.0)
    """
    return _REDUCTIONS[reduction](values)


def _observation(value: Any, label: str) -> Observation:
    if isinstance(value, str):
        value = Observation(value)
    if not isinstance(value, Observation):
        raise EnvironmentFault(
            f"{label}: the observation is {_shape(value)}; it must be a str or a turnwise.types.Observation"
        )
    _check_text(value.text, f"{label}: the observation's text")
    for media in value.media:
        data: Any = media.data if isinstance(media, Media) else media
        if not isinstance(media, Media) or not is_picture(data):
            raise EnvironmentFault(
                f"{label}: the observation's media hold {_shape(data)}; "
                "each must be a turnwise.types.Media with a uint8 array [H, W, 3]"
            )
    return value


def _info(value: Any, label: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise EnvironmentFault(f"{label}: info is {_shape(value)}; it must be a dict")
    for key in PROMPT_KEYS:
        if key in value:
            _check_text(value[key], f"{label}: info[{key!r}]")
    return value


def _check_text(value: Any, label: str) -> None:
    if not isinstance(value, str):
        raise EnvironmentFault(f"{label} is {_shape(value)}; it must be a str")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFault(
            f"{label} has {value[error.start]!a} at character {error.start}, half of a character, which no "
            "tokenizer reads; decode bytes with errors='replace'"
        ) from error


def _number(value: Any, label: str) -> float:
    size: Any = float("nan")
    if isinstance(value, (numbers.Real, np.bool_)):
        size = abs(value)
    # Unlike math.isfinite, a comparison takes integers of any length. It is false for NaN.
    if not size <= MAX_ABS:
        raise EnvironmentFault(
            f"{label} is {reprlib.repr(value)} ({type(value).__name__}); it must be a finite number, at most "
            f"{MAX_ABS:g} in size"
        )
    return float(value)


def _metrics(
    values: Any,
    label: str,
    reductions: Mapping[str, Reduction],
) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise EnvironmentFault(f"{label}: info['metrics'] is {_shape(values)}; it must be a dict of numbers")
    for name in values:
        if name not in reductions:
            raise EnvironmentFault(
                f"{label}: metric {name!r} isn't declared; metric_reductions has "
                f"{', '.join(reductions) or 'none'}: add it there with mean, sum, max, min or last."
                f"{nearest(str(name), reductions)}"
            )
    metrics = {}
    for name, value in values.items():
        # The quick check comes first, since building the text of an error takes longer.
        is_usual = type(value) is float and -MAX_ABS <= value <= MAX_ABS
        metrics[name] = value if is_usual else _number(value, f"{label}: metric {name!r}")
    return metrics


def _shape(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
