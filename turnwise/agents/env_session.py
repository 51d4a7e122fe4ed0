"""Calls one environment, from constructor to `close`. Each call has a deadline; an environment that may block
has a thread."""

import asyncio
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from turnwise.envs.contract import StepResult, ask_state_key, checked_key, read_reset, read_step
from turnwise.errors import BlockingFault, EnvironmentFault
from turnwise.protocols import Env, HasStateKey, RemoteEnv, WaitsForPlace
from turnwise.runtime.foreign import Foreign
from turnwise.runtime.stopwatch import ENVIRONMENTS, Stopwatch
from turnwise.runtime.threads import DaemonThread
from turnwise.runtime.watchdog import Wait, Watchdog
from turnwise.types import Observation, Task


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Where a tag's environments are called, and how long a call may take. By default environments are
    cooperative: their calls run on the event loop, and take microseconds or are coroutines. With
    `max_in_threads` or `use_thread_lock` environments may block: each gets its own thread, so that other
    episodes continue."""

    timeout_s: float | None = None
    """Maximum seconds for one call (constructor, `reset`, `step` or `close`); None = no limit."""
    are_remote: bool = False
    """Whether environments live in worker processes, as `protocols.RemoteEnv`s."""
    max_in_threads: int = 0
    """Maximum concurrent calls of blocking environments; 0 = environments are cooperative. Ignored with
    `use_thread_lock`."""
    use_thread_lock: bool = False
    """Whether environments may block and are called one at a time. While a call is stuck, no other call
    starts."""
    place_timeout_s: float | None = None
    """Maximum seconds that a call of a blocking environment waits for other calls to end; None = no limit."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    stopwatch: Stopwatch = field(default_factory=Stopwatch, compare=False)
    places: asyncio.Semaphore | None = field(init=False, default=None, compare=False)
    """Limits the concurrent calls of blocking environments, over all agents with these settings."""

    def __post_init__(self) -> None:
        num_places = 1 if self.use_thread_lock else self.max_in_threads
        if num_places:
            object.__setattr__(self, "places", asyncio.Semaphore(num_places))

    def limit(
        self,
        tag: str,
        call: str,
        error: type[EnvironmentFault] = EnvironmentFault,
    ) -> Wait:
        """The deadline of a call. A call past it raises `error`, which names tag, call, seconds and
        setting."""
        return self.watchdog.waiting(
            f"an episode of {tag}",
            call,
            self.timeout_s,
            "env_step_timeout_s",
            error,
        )

    def opener(self, tag: str) -> "Callable[[], EnvSession]":
        """A function that opens sessions. They share the limit on concurrent calls."""
        if self.are_remote:
            return partial(WorkerSession, tag, self)
        if self.places is None:
            return partial(EnvSession, tag, self)
        return partial(ThreadSession, tag, self, self.places)


class EnvSession:
    """An environment that is called on the event loop. Each method raises EnvironmentFault past its
    deadline."""

    env: Env
    state_key: Hashable = None
    """The environment's `state_key()` before the last step; None if it has no such method."""
    has_state_key = False

    def __init__(self, tag: str, settings: CallSettings) -> None:
        self.tag = tag
        self.settings = settings

    async def make(self, make_env: Callable[[Task], Env], task: Task) -> None:
        self._episode = f"{task.id} of {self.tag}, seed {task.seed}"
        self.env = await self._answer("the environment's constructor", make_env, task)
        self._describe(type(self.env).__name__)
        # Checked once, since isinstance of a protocol takes as long as a step.
        self._keyed = self.env if isinstance(self.env, HasStateKey) else None
        self.has_state_key = self._keyed is not None
        if isinstance(self.env, WaitsForPlace):
            settings = self.settings
            limit = settings.watchdog.waiting(
                f"an episode of {self.tag}",
                f"a place for {self._class}",
                settings.place_timeout_s,
                "deadlines.env_s",
            )
            with Foreign(f"{self._class}.wait_for_place", self._episode):
                async with limit:
                    await self.env.wait_for_place()

    def _describe(self, class_name: str) -> None:
        """Notes the names of calls, for messages."""
        self._class = class_name
        self._name = f"{self.tag} ({class_name})"
        self._step = f"{class_name}.step"
        self._state_key = f"{class_name}.state_key"

    async def reset(self, seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """The first observation, and info."""
        result = await self._answer(f"{self._class}.reset", partial(self.env.reset, seed=seed))
        return read_reset(result, self._name)

    async def step(self, action: str, turn_idx: int) -> StepResult:
        """The result of an action in turn `turn_idx` (from 1)."""
        result = await self._answer(self._step, self._take_step, action)
        return read_step(result, self._name, turn_idx, self.env.metric_reductions)

    async def close(self) -> None:
        await self._answer(f"{self._class}.close", self.env.close)

    def end(self) -> None:
        """Releases the session's own resources."""

    def _take_step(self, action: str) -> Any:
        if self._keyed is not None:
            with Foreign(self._state_key):
                self.state_key = ask_state_key(self._keyed)
        return self.env.step(action)

    async def _answer(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
    ) -> Any:
        """The result of a call; a coroutine is awaited. If the call tries to end the process, only its
        episode fails."""
        stopwatch = self.settings.stopwatch
        with Foreign(name, self._episode):
            started = stopwatch.now()
            with self.settings.limit(self.tag, name, BlockingFault):
                result = function(*args)
            stopwatch.add(ENVIRONMENTS, name, started)
            if not inspect.isawaitable(result):
                return result
            started = stopwatch.now()
            async with self.settings.limit(self.tag, name):
                result = await result
            stopwatch.add("awaited environments", name, started)
            return result


class WorkerSession(EnvSession):
    """An environment in a worker process. The worker asks for the state's key within the call of `step`."""

    env: RemoteEnv

    async def make(self, make_env: Callable[[Task], Env], task: Task) -> None:
        await super().make(make_env, task)
        self._describe(self.env.class_name)
        self._keyed = None
        self.has_state_key = self.env.has_state_key

    async def step(self, action: str, turn_idx: int) -> StepResult:
        step = await super().step(action, turn_idx)
        self.state_key = checked_key(self.env.last_state_key, self._class)
        return step


class ThreadSession(EnvSession):
    """Calls an environment in a thread of its own, since some libraries only work in the thread that loaded
    them. A call past its deadline is interrupted and no longer waited for. Once this call returns, the thread
    closes the environment and ends."""

    def __init__(
        self,
        tag: str,
        settings: CallSettings,
        places: asyncio.Semaphore,
    ) -> None:
        super().__init__(tag, settings)
        self._places = places
        self._thread = DaemonThread(tag)
        self._is_stuck = False

    async def close(self) -> None:
        if self._is_stuck:
            self._thread.start(self.env.close)
        else:
            await super().close()

    def end(self) -> None:
        self._thread.end()

    async def _answer(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
    ) -> Any:
        """Calls `function` in the thread once `places` allows it. A coroutine that the call returns runs on
        the event loop."""
        place_limit = self.settings.watchdog.waiting(
            f"an episode of {self.tag}",
            f"its turn to call {name}",
            self.settings.place_timeout_s,
            "deadlines.env_s",
        )
        async with place_limit:
            await self._places.acquire()
        started = self.settings.stopwatch.now()
        call = self._thread.start(self._called, name, function, *args)
        try:
            async with self.settings.limit(self.tag, name):
                result = await asyncio.wrap_future(call)
                if not inspect.isawaitable(result):
                    return result
                with Foreign(name, self._episode):
                    return await result
        finally:
            self.settings.stopwatch.add("environments in threads", name, started)
            self._is_stuck = not call.done()
            if self._is_stuck:
                self._thread.interrupt()
            if self._is_stuck and self.settings.use_thread_lock:
                loop = asyncio.get_running_loop()
                call.add_done_callback(lambda _: loop.call_soon_threadsafe(self._places.release))
            else:
                self._places.release()

    def _called(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Makes a call in the thread. `Foreign` converts exceptions that a future can't carry."""
        with Foreign(name, self._episode):
            return function(*args)
