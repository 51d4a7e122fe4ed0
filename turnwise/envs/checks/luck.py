"""Measures how often a random player succeeds."""

import time
from collections.abc import Callable, Iterable
from functools import partial

from turnwise.envs.checks.checked_env import CallResult, CallTimes, CheckedEnv, Timings
from turnwise.envs.checks.findings import reported_successes
from turnwise.envs.contract import reduce_metric
from turnwise.envs.players import RandomPlayer
from turnwise.errors import TurnwiseError
from turnwise.protocols import Env
from turnwise.types import derive_seed

CALL_TIMEOUT_S = 1.0
MIN_EPISODES = 50
"""Minimum episodes of a measurement."""


def random_outcomes(
    make: Callable[[], Env],
    seeds: Iterable[int],
    max_steps: int,
    budget_s: float,
) -> list[bool]:
    """Plays one episode per seed with a random player, up to `max_steps` actions. Returns whether each
    succeeded by the environment's metric `success`. The player draws as `ActionDraw` does.

    The result is empty if the environment has nothing to draw from, doesn't report `success` or fails in a
    call, or if fewer than `MIN_EPISODES` episodes were begun within `budget_s` seconds: a partial measurement
    proves nothing."""
    outcomes: list[bool] = []
    ends_at = time.monotonic() + budget_s
    for seed in seeds:
        try:
            outcome = _play(make, seed, max_steps)
        except TurnwiseError:
            return []
        if outcome is None:
            return []
        outcomes.append(outcome)
        if time.monotonic() > ends_at:
            break
    if len(outcomes) < MIN_EPISODES:
        return []
    return outcomes


def _play(make: Callable[[], Env], seed: int, max_steps: int) -> bool | None:
    """Whether one episode succeeded; None if the environment has nothing to draw from, or doesn't report
    `success`."""
    with CheckedEnv(make, CALL_TIMEOUT_S, CallTimes(Timings)) as env:
        env.reset(seed)
        make_player = partial(RandomPlayer, env.env, derive_seed(seed, "random player"))
        player: RandomPlayer = env.call("actions", make_player)
        if not player.draw or "success" not in env.reductions:
            return None
        steps: list[CallResult] = []
        for _ in range(max_steps):
            steps.append(env.step(env.call("random_action", player.act)))
            if steps[-1].is_over:
                break
        env.close()
        successes = reported_successes(steps)
        if not successes:
            return None
        return reduce_metric(successes, env.reductions["success"]) > 0.5
