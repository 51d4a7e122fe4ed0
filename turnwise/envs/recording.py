"""An episode of any environment as it looked: a wrapper that watches and changes nothing."""

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.contract import is_picture
from turnwise.protocols import Env, HasStateKey
from turnwise.types import Observation, Reduction


@dataclass(frozen=True, slots=True)
class View:
    """An environment after one call: what the call returned, and what `render()` gave then."""

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


@dataclass(slots=True)
class EpisodeRecording:
    """The views of one episode: after `reset`, and after each `step`."""

    views: list[View] = field(default_factory=list)


def record(env: Env, recording: EpisodeRecording) -> Env:
    """The environment itself, but that every `reset` and `step` adds a view to `recording`."""
    if isinstance(env, HasStateKey):
        return _KeyedRecordingEnv(env, recording, env.state_key)
    return RecordingEnv(env, recording)


class RecordingEnv:
    """Passes every call on, and looks at the environment after it. Like it, it may be synchronous or not."""

    def __init__(self, env: Env, recording: EpisodeRecording) -> None:
        self._env = env
        self._recording = recording

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return self._env.metric_reductions

    def reset(self, *, seed: int | None = None) -> Any:
        self._recording.views.clear()
        return self._seen(self._env.reset(seed=seed))

    def step(self, action: str) -> Any:
        return self._seen(self._env.step(action))

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> Any:
        return self._env.close()

    def _seen(self, result: Any) -> Any:
        if inspect.isawaitable(result):
            return self._seen_later(result)
        self._recording.views.append(View(result, self._look()))
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


class _KeyedRecordingEnv(RecordingEnv):
    """Records an environment that names its states; one that doesn't must not seem to have a `state_key`."""

    def __init__(self, env: Env, recording: EpisodeRecording, state_key: Callable[[], Hashable]) -> None:
        super().__init__(env, recording)
        self._state_key = state_key

    def state_key(self) -> Hashable:
        return self._state_key()
