"""The workers of an environment's tag, and environments that live in them."""

import asyncio
import itertools
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from turnwise.cluster.env_child import ABANDON, STACK, EnvFacts, Stepped
from turnwise.cluster.env_worker import ENV_CHILD, EnvWorker, Waiting
from turnwise.cluster.fork_server import prepare_processes
from turnwise.cluster.hosts import Hosts
from turnwise.cluster.messages import SetUp, dumps, unsendable_part
from turnwise.cluster.process import WorkerProcess, add_stacks
from turnwise.errors import ConfigError, EnvironmentFault, EnvWorkersDeadError, WorkerError, first_line
from turnwise.protocols import Env
from turnwise.runtime.stopwatch import Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.types import Reduction, Task

logger = logging.getLogger(__name__)

MAX_ENDS = 3
"""Number of ends of a tag's workers within `ENDS_S` that ends the run."""
ENDS_S = 600.0
_STACK_S = 1.0  # seconds to wait for the stack of a call
_MODULES = ("turnwise.cluster.env_child",)


def prepare_workers() -> None:
    """Starts the fork server of this process, so that it imports what workers need meanwhile."""
    prepare_processes(_MODULES)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How the environments of a tag are called."""

    tag: str
    class_name: str
    """The class of the environments, for messages."""
    is_blocking: bool = False
    """Whether a call blocks the event loop until its answer is there, so that everything happens in the order
    of cooperative environments."""
    start_s: float | None = None
    """Maximum seconds until the workers are set up; None = no limit."""
    stuck_s: float = 600.0
    """Seconds after which a worker is killed because a call in it that nobody waits for still runs."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    stopwatch: Stopwatch = field(default_factory=Stopwatch, compare=False)


class EnvPool:
    """The workers of a tag. `make_env` is sent to them, and makes an environment there. `hosts` starts their
    processes, by default as forks of this machine.

    A worker that ends fails the calls that wait for it and is started again. If workers have ended `MAX_ENDS`
    times within `ENDS_S`, every call raises EnvWorkersDeadError."""

    def __init__(
        self,
        make_env: Callable[[], Env],
        num_workers: int,
        settings: PoolSettings,
        loop: asyncio.AbstractEventLoop,
        hosts: Hosts | None = None,
    ) -> None:
        self.settings = settings
        self.num_workers = num_workers
        self.loop = loop
        self._make_env = make_env
        self._hosts = hosts
        self._workers: list[EnvWorker] = []
        self._ids = itertools.count()
        self._ends: deque[float] = deque(maxlen=MAX_ENDS)
        self._dead: EnvWorkersDeadError | None = None
        self._is_started = False
        self._is_ended = False
        self._replacing = Lock()

    def begin(self) -> None:
        """Starts the workers. Raises ConfigError if environments can't be made in them, because something
        can't be sent or imported there; DeadlineError if that takes too long."""
        tag = self.settings.tag
        try:
            dumps(self._make_env)
        except Exception as error:  # boundary: a user's class or its arguments define how they are pickled
            part = unsendable_part(self._make_env, self.settings.class_name)
            raise ConfigError(
                f"custom_envs.{tag}: {part} can't be sent to a worker: {first_line(error)}; make it in the "
                "environment's constructor, or set max_env_num_per_worker to 0"
            ) from error
        waiting = self.settings.watchdog.waiting(
            "the start", f"the environment workers of {tag}", self.settings.start_s, "deadlines.start_s"
        )
        with waiting:
            set_ups = [self._begin_worker(is_tried=number == 0) for number in range(self.num_workers)]
            for worker, set_up in zip(self._workers, set_ups, strict=True):
                self._require(worker, set_up)
        self._is_started = True

    def _require(self, worker: EnvWorker, set_up: Future[str]) -> None:
        """Waits for a worker's set-up. Raises ConfigError if it fails."""
        tag = self.settings.tag
        name = self.settings.class_name
        try:
            problem = set_up.result()
        except WorkerError:
            raise
        except Exception as error:  # boundary: what a user's module raises when it is imported
            raise ConfigError(
                f"custom_envs.{tag}: {worker.process.name} can't import {name}: {type(error).__name__}: "
                f"{first_line(error)}; put its module into a folder of PYTHONPATH that every node has, or "
                "set max_env_num_per_worker to 0"
            ) from error
        if problem:
            raise ConfigError(
                f"custom_envs.{tag}: {name}.reset returned what can't be sent from its worker: {problem}; "
                "return plain values in info, or set max_env_num_per_worker to 0"
            )

    def _begin_worker(self, is_tried: bool = False) -> Future[str]:
        name = (
            f"the worker {len(self._workers)} of {self.settings.class_name} (custom_envs.{self.settings.tag})"
        )
        worker, set_up = self._new_worker(name, is_tried)
        self._workers.append(worker)
        return set_up

    def _new_worker(self, name: str, is_tried: bool = False) -> tuple[EnvWorker, Future[str]]:
        prepare_workers()
        loop = None if self.settings.is_blocking else self.loop
        worker = EnvWorker(self._process(name), loop, self._on_end)
        levels = {name: logging.getLogger(name).level for name in ("", "turnwise")}
        environment = dict(os.environ) if self._hosts is None else self._hosts.environment
        set_up = SetUp(environment, list(sys.path), os.getcwd(), levels, _nothing)
        return worker, worker.begin(set_up, self._make_env, is_tried)

    def _process(self, name: str) -> WorkerProcess:
        if self._hosts is not None:
            return self._hosts.start_beside(ENV_CHILD, name)
        return WorkerProcess.fork(name, ENV_CHILD, self.settings.stopwatch)

    def make(self, task: Task, renders: bool = False) -> Any:
        """A RemoteEnv for an episode of the task, in the worker with the fewest environments: a coroutine, or
        with `is_blocking` the environment itself. With `renders`, every `reset` and `step` renders too."""
        if self._dead is not None:
            raise self._dead
        worker = min(self._workers, key=lambda worker: (worker.is_gone, len(worker.env_ids)))
        return RemoteEnv(self, worker, next(self._ids), task, renders).make()

    def end(self) -> None:
        """Ends the workers, even in the middle of calls. Calling it again is harmless."""
        with self._replacing:
            if self._is_ended:
                return
            self._is_ended = True
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.end()

    def _on_end(self, worker: EnvWorker, story: str) -> Exception:
        """Runs in the thread of a worker that has ended: starts another one in its place. Returns the error
        for the calls that wait."""
        settings = self.settings
        with self._replacing:
            ended = EnvironmentFault(
                f"{worker.process.name} has ended: {story}; the episode is played elsewhere"
            )
            if self._is_ended or not self._is_started:
                return ended
            # A lost node ends all of its workers at once, which says nothing about the class.
            if not worker.process.life.has_lost_node and self._ends_too_often():
                self._dead = EnvWorkersDeadError(
                    f"workers of {settings.class_name} (custom_envs.{settings.tag}) have ended {MAX_ENDS} "
                    f"times within {ENDS_S / 60:g} minutes, at last: {story}; the class ends the process "
                    "that it runs in: run `turnwise check-env` on it, or set a lower "
                    "max_env_num_per_worker if memory ran out"
                )
                return self._dead
            logger.warning("%s has ended: %s; it is started again", worker.process.name, story)
            worker.release()  # so that it counts no more where another one is placed
            try:
                another, _ = self._new_worker(worker.process.name)
            except Exception as error:  # boundary: Ray and the system raise errors of their own
                self._dead = EnvWorkersDeadError(f"{worker.process.name} can't be started again: {error}")
                return self._dead
            self._workers[self._workers.index(worker)] = another
        return ended

    def _ends_too_often(self) -> bool:
        """Notes the end of a worker. Returns whether it is the last that the tag may have."""
        now = time.monotonic()
        self._ends.append(now)
        return len(self._ends) == MAX_ENDS and now - self._ends[0] <= ENDS_S


class RemoteEnv:
    """A `protocols.RemoteEnv` in a worker. Its methods are coroutines, unless the pool `is_blocking`."""

    metric_reductions: Mapping[str, Reduction]
    class_name: str
    has_state_key: bool
    last_state_key: Hashable = None

    def __init__(
        self,
        pool: EnvPool,
        worker: EnvWorker,
        env_id: int,
        task: Task,
        renders: bool,
    ) -> None:
        self._pool = pool
        self._worker = worker
        self._id = env_id
        self._task = task
        self._renders = renders
        self._rendered: Any = None
        self._is_abandoned = False
        worker.env_ids.add(env_id)

    def make(self) -> Any:
        """This environment, once it is made."""
        return self._call(self._made, "make")

    def reset(self, *, seed: int | None = None) -> Any:
        return self._call(self._stepped, "reset", seed, self._renders)

    def step(self, action: str) -> Any:
        """See `Env.step`. The worker asks for the state's key before the step."""
        return self._call(self._stepped, "step", action, self._renders)

    def render(self) -> Any:
        """What the environment rendered after its last call; None unless it was made to render."""
        return self._rendered

    def expert_action(self) -> Any:
        """See `HasExpert`."""
        return self._call(_same, "ask", "expert_action")

    def close(self) -> Any:
        """See `Env.close`. Does nothing if the worker has ended, or closes the environment by itself because
        a call in it was given up."""
        if self._is_abandoned or self._worker.is_gone:
            self._worker.env_ids.discard(self._id)
            return None
        return self._call(_same, "close")

    def _call(self, read: Callable[[Any], Any], method: str, *args: Any) -> Any:
        answer = self._worker.start(self._id, method, *args)
        answer.add_done_callback(partial(self._answered, method))
        if isinstance(answer, Future):
            return read(self._blocked(answer))
        return self._awaited(read, answer)

    def _blocked(self, answer: Future[Any]) -> Any:
        try:
            return answer.result()
        except BaseException:
            if not answer.done():
                self._abandon()
            raise

    async def _awaited(self, read: Callable[[Any], Any], answer: asyncio.Future[Any]) -> Any:
        try:
            return read(await answer)
        except asyncio.CancelledError:
            wait = self._pool.settings.watchdog.expired()
            if wait is None:
                self._abandon()
                raise
            stack = self._worker.start(self._id, STACK)  # before the call is interrupted
            self._abandon()
            add_stacks(wait, self._worker.process.name, await _text_of(stack))
            raise

    def _made(self, facts: EnvFacts) -> "RemoteEnv":
        self.class_name = facts.class_name
        self.metric_reductions = facts.metric_reductions
        self.has_state_key = facts.has_state_key
        return self

    def _stepped(self, stepped: Stepped) -> Any:
        self.last_state_key = stepped.state_key
        self._rendered = stepped.rendered
        return stepped.result

    def _answered(self, method: str, answer: Waiting) -> None:
        """Notes whether the environment still lives in its worker."""
        if answer.cancelled():
            return
        error = answer.exception()  # asyncio complains about exceptions that nobody has looked at
        if method in ("close", ABANDON) or (method == "make" and error is not None):
            self._worker.env_ids.discard(self._id)

    def _abandon(self) -> None:
        """Nobody waits for the running call any more. The worker closes the environment when its thread comes
        back; if it doesn't, it is killed."""
        self._is_abandoned = True
        freed = self._worker.start(self._id, ABANDON)
        freed.add_done_callback(partial(self._answered, ABANDON))
        self._pool.loop.call_later(self._pool.settings.stuck_s, self._kill_if_stuck, freed)

    def _kill_if_stuck(self, freed: Waiting) -> None:
        if freed.done():
            return
        settings = self._pool.settings
        logger.warning(
            "%s is killed: a call of %s that was given up still runs after deadlines.env_s %g s",
            self._worker.process.name,
            self._task.id,
            settings.stuck_s,
        )
        self._worker.kill()


async def _text_of(stack: Waiting) -> str:
    """The answer to `STACK`. C code that keeps Python's lock lets no thread of a worker answer."""
    assert not isinstance(stack, Future), "only calls that are awaited are cancelled"
    await asyncio.wait([stack], timeout=_STACK_S)
    if not stack.done() or stack.exception() is not None:
        return "it doesn't say"
    text: str = stack.result()
    return text


def _same(value: Any) -> Any:
    return value


def _nothing() -> None: ...
