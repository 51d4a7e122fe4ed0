"""Records how an episode of an environment looks, without changing the episode."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.contract import is_picture
from turnwise.protocols import Env, EpisodeObserver, SilentObserver
from turnwise.types import Observation


@dataclass(frozen=True, slots=True)
class View:
    """What `reset` or `step` returned, and what `render()` returned right after."""

    result: tuple[Any, ...]
    rendered: Any

    @property
    def picture(self) -> NDArray[np.uint8] | str:
        """The rendered picture (uint8 [H, W, 3]) or string; else the observation's first image; else the
        observation's text."""
        rendered: NDArray[np.uint8] | str = self.rendered
        if isinstance(rendered, str) or is_picture(rendered):
            return rendered
        observation = self.result[0]
        if not isinstance(observation, Observation):
            observation = Observation(observation)
        if observation.media:
            return observation.media[0].data
        return observation.text


class Views(SilentObserver):
    """Keeps a View of each `reset` and `step`; a `reset` clears the earlier ones."""

    def __init__(self) -> None:
        self.views: list[View] = []

    def reset(self, env: Env, result: tuple[Any, ...]) -> None:
        self.views[:] = [View(result, _look(env))]

    def stepped(self, env: Env, action: str, result: tuple[Any, ...]) -> None:
        self.views.append(View(result, _look(env)))


class ObservedEnv:
    """Passes all calls to an environment, and tells the observer each `reset` and `step`."""

    def __init__(self, env: Env, observer: EpisodeObserver) -> None:
        self._env = env
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, *, seed: int | None = None) -> Any:
        result = self._env.reset(seed=seed)
        return _told(result, partial(self._observer.reset, self._env))

    def step(self, action: str) -> Any:
        result = self._env.step(action)
        return _told(result, partial(self._observer.stepped, self._env, action))


def observed(env: Any, observer: EpisodeObserver) -> Any:
    """An ObservedEnv of an environment; if it is awaitable, a coroutine that returns one."""
    if inspect.isawaitable(env):
        return _observed_later(env, observer)
    return ObservedEnv(env, observer)


async def _observed_later(awaited: Awaitable[Env], observer: EpisodeObserver) -> ObservedEnv:
    return ObservedEnv(await awaited, observer)


def _told(result: Any, tell: Callable[[Any], None]) -> Any:
    """The result, once it is told; if it is awaitable, a coroutine that tells what it returns."""
    if inspect.isawaitable(result):
        return _told_later(result, tell)
    tell(result)
    return result


async def _told_later(awaited: Awaitable[Any], tell: Callable[[Any], None]) -> Any:
    return _told(await awaited, tell)


def _look(env: Env) -> Any:
    try:
        rendered = env.render()
    except NotImplementedError:
        return None
    if isinstance(rendered, np.ndarray):
        return rendered.copy()  # some environments draw the next picture into the same array
    return rendered
