"""FrozenLake as a service would answer: each step takes a while, now and then a long one."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar

from turnwise.envs.base import Step
from turnwise.envs.frozen_lake import FrozenLakeEnv

MEDIAN_S, SIGMA = 0.018, 1.43
"""Of the log-normal latency of a step: mean 50 ms, 99th percentile 500 ms."""


class SlowLake(FrozenLakeEnv):
    """Waits before each answer. Siblings wait differently: the latencies follow from the number of the environment."""

    _numbers_given: ClassVar[Iterator[int]] = count()

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._latencies = random.Random(f"latency {next(self._numbers_given)}")

    async def step(self, action: str) -> Step:  # type: ignore[override]
        await asyncio.sleep(self._latencies.lognormvariate(math.log(MEDIAN_S), SIGMA))
        return super().step(action)
