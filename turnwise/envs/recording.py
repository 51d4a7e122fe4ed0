"""Records how an episode of any environment looked, with a wrapper that changes nothing."""

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.contract import is_picture
from turnwise.protocols import Env
from turnwise.types import Observation


@dataclass(frozen=True, slots=True)
class View:
    """An environment after one call: what the call returned, and what `render()` returned then."""

    result: tuple[Any, ...]
    rendered: Any

    @property
    def picture(self) -> NDArray[np.uint8] | str:
        """The rendered picture, uint8 [H, W, 3]; else the first image of the observation; else text."""
        observation = self.result[0] if isinstance(self.result[0], Observation) else Observation(self.result[0])
        if is_picture(self.rendered):
            return np.asarray(self.rendered)
        if isinstance(self.rendered, str):
            return self.rendered
        return observation.media[0].data if observation.media else observation.text


class RecordingEnv:
    """Keeps the `views` of an episode, after `reset` and after each `step`. Everything else is the environment's own."""

    def __init__(self, env: Env, views: list[View]) -> None:
        self._env = env
        self._views = views

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, *, seed: int | None = None) -> Any:
        self._views.clear()
        return self._seen(self._env.reset(seed=seed))

    def step(self, action: str) -> Any:
        return self._seen(self._env.step(action))

    def _seen(self, result: Any) -> Any:
        if inspect.isawaitable(result):
            return self._seen_later(result)
        self._views.append(View(result, self._look()))
        return result

    async def _seen_later(self, result: Any) -> Any:
        return self._seen(await result)

    def _look(self) -> Any:
        try:
            rendered = self._env.render()
        except NotImplementedError:
            return None
        # Environments draw the next picture over the last one.
        return rendered.copy() if isinstance(rendered, np.ndarray) else rendered
