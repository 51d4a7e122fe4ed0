"""An inference engine in virtual time: requests share its steps, as continuous batching does."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.types import Completion, Media, SamplingParams, VersionRun


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """The service times of an engine. A step decodes a token of each running request."""

    step_s: float = 0.012
    """Seconds of a step with one request."""
    token_s: float = 0.0001
    """Seconds that each further request adds to a step."""
    prompt_s: float = 0.00002
    """Seconds of a new token of a prompt."""
    max_running: int = 256
    """Maximum number of requests that run at once; the others wait."""
    mean_tokens: float = 120.0
    """Mean length of a response; lengths are drawn from a lognormal distribution."""
    sigma: float = 0.6
    """Standard deviation of the logarithm of the lengths."""
    between_s: float = 0.0
    """Seconds before a request of a conversation that has had one: the controller's between two turns."""

    def step_of(self, num_running: int) -> float:
        return self.step_s + self.token_s * (num_running - 1)

    @property
    def tokens_a_second(self) -> float:
        """The most that an engine decodes."""
        return self.max_running / self.step_of(self.max_running)


@dataclass(slots=True)
class _Running:
    answer: asyncio.Future[None]
    num_steps: float
    num_left: float = 0.0
    """The steps that were left when it was interrupted."""


class SimulatedEngine:
    """Answers each request with `answer`, after the time that a response of a random length takes here beside
    all others. A length depends on the request's seed alone."""

    def __init__(
        self,
        answer: Sequence[int],
        times: EngineTimes,
        interrupted: dict[int | None, float] | None = None,
    ) -> None:
        self._interrupted: dict[int | None, float] = {} if interrupted is None else interrupted
        """By the seed of a request: the tokens that an interrupted response has left."""
        self._answer = np.array(answer, np.int64)
        self._logprobs = np.zeros(len(answer), np.float32)
        self._times = times
        self._numbers = itertools.count()
        self._ends: list[tuple[float, int, _Running]] = []
        """Running requests by the step in which they end."""
        self._waiting: deque[_Running] = deque()
        self._steps = 0.0
        self._changed = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._seen: dict[str, int] = {}
        self.version = 0
        self.busy_s = 0.0
        self.cpu_s = 0.0
        """CPU seconds that the simulation itself has taken of the thread."""
        self.num_tokens = 0.0
        self.num_requests = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
    ) -> Completion:
        times = self._times
        started = time.thread_time()
        num_tokens = self._interrupted.pop(sampling.seed, 0.0) or self._length_of(sampling.seed)
        self.cpu_s += time.thread_time() - started
        if times.between_s and request_id in self._seen:
            await asyncio.sleep(times.between_s)
        started = time.thread_time()
        running = self._request(prompt_ids, request_id, num_tokens)
        self.cpu_s += time.thread_time() - started
        version = self.version
        await running.answer
        if running.num_left:
            self._interrupted[sampling.seed] = running.num_left
            self.num_tokens -= running.num_left
            return Completion(self._answer[:0], self._logprobs[:0], "aborted", ())
        runs = (VersionRun(version, len(self._answer)),)
        return Completion(self._answer, self._logprobs, "stop", runs)

    def _request(self, prompt_ids: Sequence[int], request_id: str, num_tokens: float) -> _Running:
        """Begins a request of so many tokens, or lets it wait."""
        times = self._times
        num_new = len(prompt_ids) - self._seen.get(request_id, 0)
        self._seen[request_id] = len(prompt_ids)
        running = _Running(
            asyncio.get_running_loop().create_future(), num_tokens + num_new * times.prompt_s / times.step_s
        )
        self._advance()
        self.num_requests += 1
        self.num_tokens += num_tokens
        if len(self._ends) < times.max_running:
            self._begin(running)
        else:
            self._waiting.append(running)
        self._schedule()
        return running

    def interrupt(self) -> None:
        """Ends all requests as `aborted`. Whoever shares `interrupted` continues them where they stood."""
        self._advance()
        for end, _, running in self._ends:
            running.num_left = max(end - self._steps, 1.0)
            running.answer.set_result(None)
        for running in self._waiting:
            running.num_left = running.num_steps
            running.answer.set_result(None)
        self._ends.clear()
        self._waiting.clear()
        self._schedule()

    def _length_of(self, seed: int | None) -> float:
        """Number of tokens of a response."""
        draw = random.Random(seed)
        mean = np.log(self._times.mean_tokens) - self._times.sigma**2 / 2
        return max(1.0, round(draw.lognormvariate(float(mean), self._times.sigma)))

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait."""
        return bool(self._ends or self._waiting)

    async def abort(self, request_id: str) -> None: ...

    async def release(self, request_id: str) -> None:
        self._seen.pop(request_id, None)

    def _begin(self, running: _Running) -> None:
        heapq.heappush(self._ends, (self._steps + running.num_steps, next(self._numbers), running))

    def _advance(self) -> None:
        """Makes the steps since the last change."""
        now = asyncio.get_running_loop().time()
        elapsed = now - self._changed
        self._changed = now
        if self._ends:
            self._steps += elapsed / self._times.step_of(len(self._ends))
            self.busy_s += elapsed

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            remaining = max(0.0, self._ends[0][0] - self._steps)
            delay = remaining * self._times.step_of(len(self._ends))
            self._timer = asyncio.get_running_loop().call_later(delay, self._end_some)

    def _end_some(self) -> None:
        started = time.thread_time()
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, _, running = heapq.heappop(self._ends)
            if not running.answer.done():
                running.answer.set_result(None)
            if self._waiting:
                self._begin(self._waiting.popleft())
        self._schedule()
        self.cpu_s += time.thread_time() - started
