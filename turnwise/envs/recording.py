"""Records how an episode of an environment looks, without changing the episode."""

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
    """What `reset` or `step` returned, and what `render()` returned right after."""

    result: tuple[Any, ...]
    rendered: Any

    @property
    def picture(self) -> NDArray[np.uint8] | str:
        """The rendered picture (uint8 [H, W, 3]) or string; else the observation's first image; else the observation's text."""
        rendered: NDArray[np.uint8] | str = self.rendered
        if isinstance(rendered, str) or is_picture(rendered):
            return rendered
        observation = self.result[0] if isinstance(self.result[0], Observation) else Observation(self.result[0])
        return observation.media[0].data if observation.media else observation.text


class RecordingEnv:
    """Passes all calls to an environment. `reset` clears `views`; `reset` and each `step` append a View."""

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
        # Some environments draw the next picture into the same array.
        return rendered.copy() if isinstance(rendered, np.ndarray) else rendered
