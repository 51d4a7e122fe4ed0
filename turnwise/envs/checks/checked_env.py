"""An environment under examination: each call is timed and has a deadline, and a fault in it becomes a
BrokenCall."""

import asyncio
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as CallTimeout
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple

from turnwise.envs.contract import PROMPT_KEYS, StepResult, check_shape, read_reset, read_state_key, read_step
from turnwise.errors import EnvironmentFault, TurnwiseError
from turnwise.protocols import Env
from turnwise.runtime.call_board import CALLS
from turnwise.runtime.event_loop import new_loop
from turnwise.runtime.stacks import describe_calls
from turnwise.runtime.threads import DaemonThread
from turnwise.types import Observation, Reduction

_MAX_SHOWN = 40


class CallResult(NamedTuple):
    """Everything that the agent and credit assignment get from one `reset` or `step`."""

    text: str
    images: tuple[bytes, ...]
    prompt: tuple[str, ...]
    """The values of `PROMPT_KEYS` in `info`."""
    reward: float = 0.0
    is_terminated: bool = False
    is_truncated: bool = False
    metrics: tuple[tuple[str, float], ...] = ()
    state_key: Hashable = None

    @property
    def is_over(self) -> bool:
        return self.is_terminated or self.is_truncated

    @property
    def content(self) -> Hashable:
        """Everything shown, and the state key, if there is one."""
        return self.prompt, self.text, self.images, self.state_key

    @property
    def state(self) -> Hashable:
        """Identifies a start: the state key or, if there is none, everything shown."""
        if self.state_key is None:
            return self.content
        return self.state_key


def first_difference(expected: Sequence[CallResult], got: Sequence[CallResult]) -> tuple[str, str] | None:
    """The first difference of two episodes, as `(name of the field, description)`; None if they are equal.
    The name is "end" if one episode is shorter.

    >>> first_difference([CallResult("P _", (), ())], [CallResult("_ P", (), ())])
    ('text', "at the start: text 'P _' and '_ P'")
    """
    for turn, (first, second) in enumerate(zip_longest(expected, got)):
        place = f"at turn {turn}" if turn else "at the start"
        if first is None or second is None:
            return "end", f"{place}: one episode is over and the other continues"
        for name in CallResult._fields:
            value = getattr(first, name)
            second_value = getattr(second, name)
            if value == second_value:
                continue
            if name == "images":
                return name, f"{place}: images the pictures differ"
            return name, f"{place}: {name} {_shown(value, second_value)}"
    return None


def _shown(first: object, second: object) -> str:
    """The `repr` of both values. If one is longer than `_MAX_SHOWN`, both are cut to the part around their
    first difference."""
    texts = [repr(first), repr(second)]
    start = 0
    if max(map(len, texts)) > _MAX_SHOWN:
        pairs = enumerate(zip(*texts, strict=False))
        num_same = next((i for i, (a, b) in pairs if a != b), 0)
        start = max(num_same - _MAX_SHOWN // 2, 0)
    end = start + _MAX_SHOWN
    excerpts = []
    for text in texts:
        excerpt = text[start:end]
        if start:
            excerpt = f"…{excerpt}"
        if len(text) > end:
            excerpt = f"{excerpt}…"
        excerpts.append(excerpt)
    return " and ".join(excerpts)


class BrokenCall(EnvironmentFault):
    """A call that hung, raised, or returned what the contract of environments forbids."""

    def __init__(
        self,
        method: str,
        problem: str,
        trace: tuple[str, ...] = (),
        hangs: bool = False,
        is_raised: bool = False,
    ) -> None:
        super().__init__(problem)
        self.method = method
        self.problem = problem
        self.trace = trace
        """The calls that led to the exception, innermost last."""
        self.hangs = hangs
        self.is_raised = is_raised


@dataclass(slots=True)
class Timings:
    """Wall-clock and CPU seconds of each call of one method."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    is_async: bool = False


CallTimes = defaultdict[str, Timings]
"""Method → timings, over all environments of an examination."""


class CheckedEnv(AbstractContextManager["CheckedEnv"]):
    """An environment in its own thread, so that a call that never returns can be abandoned. A failed call
    raises BrokenCall; a TurnwiseError of the environment's constructor passes unchanged."""

    def __init__(
        self,
        make: Callable[[], Env],
        timeout_s: float,
        clock: CallTimes,
    ) -> None:
        self._thread = DaemonThread("check-env")
        self._timeout_s = timeout_s
        self._clock = clock
        self._runner: asyncio.Runner | None = None
        self._num_steps = 0
        try:
            self.env: Env = self.call("the constructor", make)
        except TurnwiseError:
            self.__exit__()
            raise
        self.name = type(self.env).__name__

    @cached_property
    def reductions(self) -> dict[str, Reduction]:
        """The environment's `metric_reductions`, after `check_shape`."""
        self.call("metric_reductions", partial(check_shape, self.env))
        return dict(self.env.metric_reductions)

    # Methods are looked up inside the thread, since `__getattr__` of an environment may compute them.

    def reset(self, seed: int) -> CallResult:
        self._num_steps = 0
        observation, info = self.call(
            "reset",
            lambda: self.env.reset(seed=seed),
            partial(read_reset, env_name=self.name),
        )
        return self._result(observation, info)

    def step(self, action: str) -> CallResult:
        self._num_steps += 1
        read = partial(
            read_step,
            env_name=self.name,
            turn=self._num_steps,
            reductions=self.reductions,
        )
        step: StepResult = self.call("step", lambda: self.env.step(action), read)
        call_result = self._result(step.observation, step.info)
        return call_result._replace(
            reward=step.reward,
            is_terminated=step.is_terminated,
            is_truncated=step.is_truncated,
            metrics=tuple(sorted(step.metrics.items())),
        )

    def _result(self, observation: Observation, info: Mapping[str, Any]) -> CallResult:
        images = tuple(media.data.tobytes() for media in observation.media)
        prompt = tuple(str(info.get(key, "")) for key in PROMPT_KEYS)
        state_key: Hashable = self.call("state_key", partial(read_state_key, self.env))
        return CallResult(observation.text, images, prompt, state_key=state_key)

    def close(self) -> None:
        self.call("close", lambda: self.env.close())

    def __exit__(self, *exception: object) -> None:
        """Ends the thread. If a call is stuck in it, the thread ends when the call returns."""
        if self._runner is not None:
            self._thread.start(self._runner.close)
        self._thread.end()

    def call(
        self,
        method: str,
        function: Callable[[], Any],
        read: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """Calls `function` in the thread, awaits the result if it is a coroutine, and returns
        `read(result)`."""
        line = CALLS.begin(f"{method} of the environment that is examined")
        call = self._thread.start(self._timed, self._clock[method], function)
        try:
            error = call.exception(self._timeout_s)
        except CallTimeout:
            problem = f"hangs in {method}: no answer within {self._timeout_s:g} s"
            raise BrokenCall(method, problem, hangs=True) from None
        finally:
            CALLS.end(line)
        if error is None:
            try:
                return read(call.result())
            except EnvironmentFault as fault:
                error = fault
        if isinstance(error, TurnwiseError) and method == "the constructor":
            raise error
        if isinstance(error, EnvironmentFault):
            raise BrokenCall(method, str(error)) from error
        message = type(error).__name__
        if str(error):
            message += f": {error}"
        trace = tuple(call for call in describe_calls(error) if not call.startswith(__file__))
        raise BrokenCall(method, f"{method} raises {message}", trace, is_raised=True) from error

    def _timed(self, timings: Timings, function: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        cpu_started = time.thread_time()
        result = function()
        if inspect.isawaitable(result):
            timings.is_async = True
            self._runner = self._runner or asyncio.Runner(loop_factory=new_loop)
            result = self._runner.run(_awaited(result))
        timings.wall_s.append(time.perf_counter() - started)
        timings.cpu_s.append(time.thread_time() - cpu_started)
        return result


async def _awaited(result: Any) -> Any:
    return await result


def play(
    envs: Sequence[CheckedEnv],
    seed: int,
    actions: Iterable[str],
) -> list[list[CallResult]]:
    """Plays the same actions in all environments, each action everywhere before the next. Returns results by
    environment."""
    episodes = [[env.reset(seed)] for env in envs]
    for action in actions:
        for env, call_results in zip(envs, episodes, strict=True):
            if not call_results[-1].is_over:
                call_results.append(env.step(action))
    return episodes
