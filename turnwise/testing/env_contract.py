"""The check that any environment must pass before it is used for training."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from turnwise.envs.checks.session import BrokenCall, CallResult, CallTimes, CheckedEnv, Timings, first_difference
from turnwise.envs.contract import check_shape
from turnwise.errors import EnvironmentFault
from turnwise.protocols import Env

CALL_S = 60.0
"""Maximum seconds of one call of the environment."""
UNPARSED = ""


def check_env_contract(make_env: Callable[[], Env], actions: Sequence[str], seeds: Sequence[int] = (0, 1)) -> None:
    """Plays `actions` under each seed and compares: a seed must fix an episode, in a new environment and after a reset. It also
    checks return types, declared metrics, hashable state keys, an action that couldn't be parsed, and two closes. Raises
    EnvironmentFault for the first thing that is wrong. Exceptions of the environment are passed on."""
    with ExitStack() as ended:
        try:
            _check([ended.enter_context(CheckedEnv(make_env, CALL_S, CallTimes(Timings))) for _ in range(2)], actions, seeds)
        except BrokenCall as broken:
            raise broken.__cause__ if broken.is_raised and broken.__cause__ else broken from None


def _check(envs: Sequence[CheckedEnv], actions: Sequence[str], seeds: Sequence[int]) -> None:
    for env in envs:
        check_shape(env.env)
    first = [_played(envs[0], seed, actions) for seed in seeds]
    for env, how in zip(envs, ("after a reset", "in a new environment"), strict=True):
        for seed, expected in zip(seeds, first, strict=True):
            if found := first_difference(expected, _played(env, seed, actions)):
                raise EnvironmentFault(
                    f"{env.name}: seed {seed} gave another episode {how}, {found[1]}; reset must draw everything from its seed"
                )
        _played(env, seeds[0], [UNPARSED])
        env.close()
        env.close()


def _played(env: CheckedEnv, seed: int, actions: Sequence[str]) -> list[CallResult]:
    call_results = [env.reset(seed)]
    for action in actions:
        if not call_results[-1].is_over:
            call_results.append(env.step(action))
    return call_results
