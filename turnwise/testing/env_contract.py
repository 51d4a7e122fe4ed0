"""The check that any environment must pass before it is trained in."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from turnwise.envs.checks.session import CallResult, start_result, step_result
from turnwise.envs.contract import check_shape, read_reset, read_state_key, read_step
from turnwise.errors import EnvironmentFault
from turnwise.protocols import Env

UNPARSED = ""


def check_env_contract(make_env: Callable[[], Env], actions: Sequence[str], seeds: Sequence[int] = (0, 1)) -> None:
    """Plays `actions` under each seed and compares: a seed must fix an episode, in a new environment and after a reset.

    Also: return types, declared metrics, hashable state keys, an action that couldn't be parsed, and two closes. Raises
    EnvironmentFault for the first thing that is wrong."""
    asyncio.run(_check(make_env, actions, seeds))


async def _check(make_env: Callable[[], Env], actions: Sequence[str], seeds: Sequence[int]) -> None:
    env = make_env()
    name = type(env).__name__
    check_shape(env)
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


async def _record(env: Env, seed: int, actions: Sequence[str]) -> list[CallResult]:
    name = type(env).__name__
    observation, info = read_reset(await _result(partial(env.reset, seed=seed)), name)
    call_results = [start_result(observation, info, read_state_key(env))]
    for turn, action in enumerate(actions, start=1):
        step = read_step(await _result(partial(env.step, action)), name, turn, env.metric_reductions)
        call_results.append(step_result(step, read_state_key(env)))
        if call_results[-1].is_over:
            break
    return call_results


async def _result(method: Callable[[], Any]) -> Any:
    result = method()
    return await result if inspect.isawaitable(result) else result
