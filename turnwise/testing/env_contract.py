"""Checks in a test that an environment keeps the contract of docs/environments.md."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from turnwise.envs.checks.checked_env import (
    BrokenCall,
    CallTimes,
    CheckedEnv,
    Timings,
    first_difference,
    play,
)
from turnwise.envs.contract import check_shape
from turnwise.errors import EnvironmentFault
from turnwise.protocols import Env

CALL_S = 60.0
"""Maximum seconds of one call of the environment."""
UNPARSED = ""


def check_env_contract(
    make_env: Callable[[], Env],
    actions: Sequence[str],
    seeds: Sequence[int] = (0, 1),
) -> None:
    """Plays `actions` under each seed: the seed must fix the episode, in a new environment and after a reset.
    Also checks return types, declared metrics, hashable state keys, the action "" and a second `close`.
    Raises EnvironmentFault for the first fault. Exceptions of the environment are passed on."""
    with ExitStack() as ended:
        try:
            envs = [ended.enter_context(CheckedEnv(make_env, CALL_S, CallTimes(Timings))) for _ in range(2)]
            _check(envs, actions, seeds)
        except BrokenCall as broken:
            cause = broken.__cause__
            if broken.is_raised and cause:
                raise cause from None
            raise broken from None


def _check(
    envs: Sequence[CheckedEnv],
    actions: Sequence[str],
    seeds: Sequence[int],
) -> None:
    for env in envs:
        check_shape(env.env)
    expected_episodes = [play(envs[:1], seed, actions)[0] for seed in seeds]
    for env, occasion in zip(envs, ("after a reset", "in a new environment"), strict=True):
        for seed, expected in zip(seeds, expected_episodes, strict=True):
            [episode] = play([env], seed, actions)
            difference = first_difference(expected, episode)
            if difference:
                raise EnvironmentFault(
                    f"{env.name}: seed {seed} gave another episode {occasion}, {difference[1]}; reset must "
                    "draw everything from its seed"
                )
        play([env], seeds[0], [UNPARSED])
        env.close()
        env.close()
