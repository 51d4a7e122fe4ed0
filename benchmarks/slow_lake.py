"""FrozenLake as a service would answer: each step takes a while, now and then a long one."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from typing import Any, ClassVar

from turnwise.envs.base import Step
from turnwise.envs.frozen_lake.env import FrozenLakeEnv
from turnwise.types import Observation

MEDIAN_S, SIGMA = 0.018, 1.43
"""Parameters of the log-normal latency of a step: mean 50 ms, 99th percentile 500 ms."""


class SlowLake(FrozenLakeEnv):
    """Waits before each answer. Siblings wait differently: the latencies follow from the seed of the episode
    and from how many have begun with it since `forget`. Runs of one seed so wait for the same."""

    _begun: ClassVar[Counter[int]] = Counter()

    @classmethod
    def forget(cls) -> None:
        """Another run begins."""
        cls._begun.clear()

    def reset(self, *, seed: int | None = None) -> tuple[str | Observation, dict[str, Any]]:
        assert seed is not None
        self._begun[seed] += 1
        self._latencies = random.Random(f"latencies {seed} {self._begun[seed]}")
        return super().reset(seed=seed)

    async def step(self, action: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(self._latencies.lognormvariate(math.log(MEDIAN_S), SIGMA))
        return super().step(action)


class WaitingLake(FrozenLakeEnv):
    """Waits equally long before each answer."""

    def __init__(self, wait_s: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._wait_s = wait_s

    async def step(self, action: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(self._wait_s)
        return super().step(action)
