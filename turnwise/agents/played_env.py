"""An environment in the hands of a function that plays an episode in a thread of its own."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from turnwise.agents.env_session import EnvSession
from turnwise.envs.contract import StepResult, reduce_metric
from turnwise.types import Limit, Observation


class PlayedStep(NamedTuple):
    """The environment's answer to an action."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class PlayedEnv:
    """An environment after its reset. `step` blocks and `astep` is awaited; both call the environment where
    the run calls it, so that neither an environment nor its deadlines know of the thread."""

    def __init__(
        self,
        session: EnvSession,
        observation: Observation,
        info: Mapping[str, Any],
        max_steps: int,
        on_reward: Callable[[str, float], None],
    ) -> None:
        self.observation = observation.text
        """The newest observation."""
        self.info = info
        self.is_over = False
        self._session = session
        self._max_steps = max_steps
        self._on_reward = on_reward
        self._loop = asyncio.get_running_loop()
        self._num_steps = 0
        self._metrics: dict[str, list[float]] = {}
        self._limit: Limit | None = None

    def step(self, text: str) -> PlayedStep:
        """Takes an action, which the environment gets as it is. Blocks the calling thread."""
        return asyncio.run_coroutine_threadsafe(self._step(text), self._loop).result()

    async def astep(self, text: str) -> PlayedStep:
        """Takes an action, which the environment gets as it is."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._step(text), self._loop))

    @property
    def _is_cut(self) -> bool:
        return self._num_steps >= self._max_steps

    async def _step(self, text: str) -> PlayedStep:
        if self.is_over:
            raise RuntimeError("the environment's episode is over: end the function")
        if not isinstance(text, str):
            raise TypeError(f"step takes a text, not a {type(text).__name__}")
        self._num_steps += 1
        step = await self._session.step(text, self._num_steps)
        self._on_reward(text, step.reward)
        for name, value in step.metrics.items():
            self._metrics.setdefault(name, []).append(value)
        self._note_end(step)
        self.observation = step.observation.text
        self.info = step.info
        is_truncated = self._limit is not None
        return PlayedStep(
            self.observation,
            step.reward,
            step.is_terminated,
            is_truncated,
            step.info,
        )

    def _note_end(self, step: StepResult) -> None:
        if step.is_terminated:
            self.is_over = True
        elif step.is_truncated:
            self.is_over = True
            self._limit = "environment"
        elif self._is_cut:
            self.is_over = True
            self._limit = "max_steps"

    @property
    def limit(self) -> Limit | None:
        """The limit that ended the environment's episode, if one did."""
        return self._limit

    def metrics(self) -> dict[str, float]:
        """The metrics of the environment, reduced over its steps, and their number."""
        reductions = self._session.env.metric_reductions
        reduced = {name: reduce_metric(values, reductions[name]) for name, values in self._metrics.items()}
        return {"env_steps": float(self._num_steps), **reduced}
