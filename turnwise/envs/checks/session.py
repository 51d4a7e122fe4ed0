"""One environment under examination: every call is timed and has a deadline, and every fault becomes one exception."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import TimeoutError as CallTimeout
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, get_args

from turnwise.envs.checks.call_results import CallResult, start_result, step_result
from turnwise.envs.contract import read_reset, read_state_key, read_step
from turnwise.errors import EnvironmentFault, TurnwiseError
from turnwise.protocols import Env
from turnwise.runtime.call_board import CALLS
from turnwise.runtime.event_loop import new_loop
from turnwise.runtime.stacks import describe_calls
from turnwise.runtime.threads import DaemonThread
from turnwise.types import Reduction

_REDUCTIONS = ", ".join(get_args(Reduction))


class BrokenCall(EnvironmentFault):
    """A call that hung, raised, or returned what the contract forbids."""

    def __init__(
        self, method: str, problem: str, trace: tuple[str, ...] = (), hangs: bool = False, is_raised: bool = False
    ) -> None:
        super().__init__(problem)
        self.method = method
        self.problem = problem
        self.trace = trace
        """The calls of the environment that led to the exception."""
        self.hangs = hangs
        self.is_raised = is_raised


@dataclass(slots=True)
class Timings:
    """Seconds of the calls of one method, over all environments: on the clock, and of a processor."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    is_async: bool = False


@dataclass(slots=True)
class CallTimes:
    """The timings of an examination by method."""

    timings: dict[str, Timings] = field(default_factory=dict)

    def of(self, method: str) -> Timings:
        return self.timings.setdefault(method, Timings())


class CheckedEnv:
    """An environment in a thread of its own, so that a call which never returns can be left behind.

    Every method raises BrokenCall.

    Raises:
        TurnwiseError: the constructor refuses its arguments with a sentence of its own.
        BrokenCall: the constructor raises anything else, or hangs.
    """

    def __init__(self, make: Callable[[], Env], timeout_s: float, clock: CallTimes) -> None:
        self._thread = DaemonThread("check-env")
        self._timeout_s = timeout_s
        self._clock = clock
        self._runner: asyncio.Runner | None = None
        self._num_steps = 0
        try:
            self.env: Env = self.call("the constructor", make)
        except TurnwiseError:
            self.end()
            raise
        self.name = type(self.env).__name__

    @cached_property
    def reductions(self) -> Mapping[str, Reduction]:
        """The declared metrics."""
        declared = self.call("metric_reductions", lambda: self.env.metric_reductions)
        if not isinstance(declared, Mapping):
            raise BrokenCall("metric_reductions", f"metric_reductions is {declared!r}; it must map metrics to {_REDUCTIONS}")
        for metric, reduction in declared.items():
            if reduction not in get_args(Reduction):
                problem = f"metric {metric!r} has reduction {reduction!r}; allowed: {_REDUCTIONS}"
                raise BrokenCall("metric_reductions", problem)
        return declared

    # Methods are looked up in the thread too: an environment may lack one, or compute it.

    def reset(self, seed: int) -> CallResult:
        self._num_steps = 0
        result = self.call("reset", lambda: self.env.reset(seed=seed))
        observation, info = self._checked("reset", partial(read_reset, result, self.name))
        return start_result(observation, info, self._state_key())

    def step(self, action: str) -> CallResult:
        self._num_steps += 1
        result = self.call("step", lambda: self.env.step(action))
        step = self._checked("step", partial(read_step, result, self.name, self._num_steps, self.reductions))
        return step_result(step, self._state_key())

    def render(self) -> Any:
        return self.call("render", lambda: self.env.render())

    def close(self) -> None:
        self.call("close", lambda: self.env.close())

    def end(self) -> None:
        """Ends the thread; after a stuck call, only if it ever returns."""
        if self._runner is not None:
            self._thread.start(self._runner.close)
        self._thread.end()

    def call(self, method: str, function: Callable[[], Any]) -> Any:
        """The result of a function or of its coroutine."""
        line = CALLS.begin(f"{method} of the environment that is examined")
        call = self._thread.start(self._timed, self._clock.of(method), function)
        try:
            error = call.exception(self._timeout_s)
        except CallTimeout:
            raise BrokenCall(method, f"hangs in {method}: no answer within {self._timeout_s:g} s", hangs=True) from None
        finally:
            CALLS.end(line)
        if error is None:
            return call.result()
        if isinstance(error, TurnwiseError) and method == "the constructor":
            raise error
        if isinstance(error, EnvironmentFault):
            raise BrokenCall(method, str(error)) from error
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        trace = tuple(call for call in describe_calls(error) if not call.startswith(__file__))
        raise BrokenCall(method, f"{method} raises {told}", trace, is_raised=True) from error

    def _timed(self, timings: Timings, function: Callable[[], Any]) -> Any:
        started, cpu_started = time.perf_counter(), time.thread_time()
        result = function()
        if inspect.isawaitable(result):
            timings.is_async = True
            self._runner = self._runner or asyncio.Runner(loop_factory=new_loop)
            result = self._runner.run(_awaited(result))
        timings.wall_s.append(time.perf_counter() - started)
        timings.cpu_s.append(time.thread_time() - cpu_started)
        return result

    def _state_key(self) -> Hashable:
        return self.call("state_key", partial(read_state_key, self.env))

    def _checked(self, method: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except EnvironmentFault as fault:
            raise BrokenCall(method, str(fault)) from None


async def _awaited(result: Any) -> Any:
    return await result
