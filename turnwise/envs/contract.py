"""What an environment returned, checked once where it enters: wrong shapes and NaN never reach the training."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from turnwise.errors import EnvironmentFault, nearest
from turnwise.types import Observation, Reduction


class StepResult(NamedTuple):
    """The checked answer to one action."""

    observation: Observation
    reward: float
    is_terminated: bool
    is_truncated: bool
    info: Mapping[str, Any]
    metrics: dict[str, float]


def read_reset(result: Any, env_name: str) -> tuple[Observation, Mapping[str, Any]]:
    """The `(observation, info)` of a `reset`.

    Raises:
        EnvironmentFault: it isn't that.
    """
    where = f"environment {env_name}, reset"
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvironmentFault(f"{where}: got {_shape(result)}; reset returns the tuple (observation, info)")
    return _observation(result[0], where), _info(result[1], where)


def read_step(result: Any, env_name: str, turn: int, reductions: Mapping[str, Reduction]) -> StepResult:
    """The five values of a `step`, of turn `turn` (from 1).

    Raises:
        EnvironmentFault: they aren't what the contract allows, or a metric isn't declared in `reductions`.
    """
    where = f"environment {env_name}, turn {turn}"
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvironmentFault(
            f"{where}: got {_shape(result)}; step returns the tuple (observation, reward, terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, info = result
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, (bool, np.bool_)):
            raise EnvironmentFault(f"{where}: {name} is {value!r}; it must be True or False")
    info = _info(info, where)
    return StepResult(
        observation=_observation(observation, where),
        reward=_number(reward, f"{where}: the reward"),
        is_terminated=bool(terminated),
        is_truncated=bool(truncated),
        info=info,
        metrics=_metrics(info.get("metrics", {}), where, reductions),
    )


def reduce_metric(values: list[float], reduction: Reduction) -> float:
    """One number for the values of an episode's steps (at least one), in their order.

    >>> reduce_metric([0.0, 1.0, 1.0, 0.0], "mean"), reduce_metric([0.0, 1.0], "last")
    (0.5, 1.0)
    """
    match reduction:
        case "mean":
            return sum(values) / len(values)
        case "sum":
            return sum(values)
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]


def _observation(value: Any, where: str) -> Observation:
    if isinstance(value, str):
        return Observation(value)
    if isinstance(value, Observation):
        return value
    raise EnvironmentFault(f"{where}: the observation is {_shape(value)}; it must be a str or a turnwise.types.Observation")


def _info(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise EnvironmentFault(f"{where}: info is {_shape(value)}; it must be a dict")
    return value


def _number(value: Any, what: str) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if not isinstance(value, (numbers.Real, np.bool_)) or not math.isfinite(value):
        raise EnvironmentFault(f"{what} is {value!r} ({type(value).__name__}); it must be a finite number")
    return float(value)


def _metrics(values: Any, where: str, reductions: Mapping[str, Reduction]) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise EnvironmentFault(f"{where}: info['metrics'] is {_shape(values)}; it must be a dict of numbers")
    for name in values:
        if name not in reductions:
            raise EnvironmentFault(
                f"{where}: metric {name!r} isn't declared; metric_reductions has {', '.join(reductions) or 'none'}: "
                f"add it there with mean, sum, max, min or last.{nearest(str(name), reductions)}"
            )
    return {name: _number(value, f"{where}: metric {name!r}") for name, value in values.items()}


def _shape(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
