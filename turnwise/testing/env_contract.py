"""The check that any environment must pass before it is trained in."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

from turnwise.envs.contract import read_reset, read_step
from turnwise.errors import EnvironmentFault
from turnwise.protocols import Env, HasStateKey
from turnwise.types import Observation, Reduction

UNPARSED = ""


class _Moment(NamedTuple):
    """What can be seen of an environment after one call."""

    text: str
    images: tuple[bytes, ...]
    reward: float
    is_over: bool
    metrics: tuple[tuple[str, float], ...]
    state_key: Hashable


def check_env_contract(make_env: Callable[[], Env], actions: Sequence[str], seeds: Sequence[int] = (0, 1)) -> None:
    """Plays `actions` under each seed and compares: a seed must fix an episode, in a new environment and after a reset.

    Also: return types, declared metrics, hashable state keys, an action that couldn't be parsed, and two closes.

    Raises:
        EnvironmentFault: the first thing that is wrong.
    """
    asyncio.run(_check(make_env, actions, seeds))


async def _check(make_env: Callable[[], Env], actions: Sequence[str], seeds: Sequence[int]) -> None:
    env = make_env()
    name = type(env).__name__
    for metric, reduction in env.metric_reductions.items():
        if reduction not in get_args(Reduction):
            raise EnvironmentFault(f"{name}: metric {metric!r} has reduction {reduction!r}; allowed: {get_args(Reduction)}")
    first = [await _record(env, seed, actions) for seed in seeds]
    for other, how in ((env, "after a reset"), (make_env(), "in a new environment")):
        for seed, expected in zip(seeds, first, strict=True):
            got = await _record(other, seed, actions)
            if got != expected:
                turn = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), "the last")
                raise EnvironmentFault(
                    f"{name}: seed {seed} gave another episode {how}, first at turn {turn}; "
                    f"reset must draw everything from its seed"
                )
        await _record(other, seeds[0], [UNPARSED])
        await _result(other.close)
        await _result(other.close)


async def _record(env: Env, seed: int, actions: Sequence[str]) -> list[_Moment]:
    name = type(env).__name__
    observation, _ = read_reset(await _result(partial(env.reset, seed=seed)), name)
    moments = [_moment(env, observation)]
    for turn, action in enumerate(actions, start=1):
        step = read_step(await _result(partial(env.step, action)), name, turn, env.metric_reductions)
        is_over = step.is_terminated or step.is_truncated
        moments.append(_moment(env, step.observation, step.reward, is_over, step.metrics))
        if is_over:
            break
    return moments


def _moment(
    env: Env, observation: Observation, reward: float = 0.0, is_over: bool = False, metrics: dict[str, float] | None = None
) -> _Moment:
    key = env.state_key() if isinstance(env, HasStateKey) else None
    try:
        hash(key)
    except TypeError as error:
        raise EnvironmentFault(f"{type(env).__name__}: state_key() gave {key!r}; it must be hashable ({error})") from error
    images = tuple(media.data.tobytes() for media in observation.media)
    return _Moment(observation.text, images, reward, is_over, tuple(sorted((metrics or {}).items())), key)


async def _result(method: Callable[[], Any]) -> Any:
    result = method()
    return await result if inspect.isawaitable(result) else result
