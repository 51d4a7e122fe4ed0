"""The embedded server: the engine behind `protocols.InferenceServer`, on the caller's event loop."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial

from transformers import PreTrainedModel

from turnwise.errors import ServerError
from turnwise.inference.embedded.engine import Engine
from turnwise.inference.embedded.fused_runner import FusedRunner
from turnwise.inference.embedded.runner import GenericRunner, Runner
from turnwise.inference.policy import HoldsModel
from turnwise.inference.request import Decode, Finished, check_request
from turnwise.models.fused import fast_path_obstacle
from turnwise.protocols import MemoryKind, Suspension
from turnwise.runtime.info import ServerInfo
from turnwise.runtime.schedule_log import ScheduleLog
from turnwise.runtime.stopwatch import ENGINE, Stopwatch
from turnwise.spec import KV_CACHE_BYTES
from turnwise.types import Completion, Media, SamplingParams

logger = logging.getLogger(__name__)

# after so many iterations of the event loop without a new request, all callers count as waiting for tokens
_QUIET_ROUNDS = 3


class EmbeddedServer(HoldsModel):
    """Samples from a Hugging Face causal LM in this process, on its device and in its dtype.

    To change the model's parameters in place, call `suspend` before and `resume` afterwards. Up to
    `max_concurrency` requests are decoded together, in contexts of up to `max_length` tokens (default: the
    model's limit). A forward pass computes up to `max_step_tokens` tokens: one per decoding request, the rest
    from prompts. `kv_cache_bytes` bounds the cache of running and idle conversations. `decode` turns ids into
    text; requests with stop strings need it. With `reads_trainer` the model is the trainer's own.
    `schedule_log` records which requests each step admits, or prescribes them. Responses include the stop
    token, or the token that completed a stop string. Raises ConfigError if `kv_cache_bytes` has no room for
    one sequence of `max_length` tokens."""

    name = "the embedded server"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_length: int | None = None,
        max_concurrency: int = 256,
        kv_cache_bytes: int = KV_CACHE_BYTES,
        max_step_tokens: int = 8192,
        decode: Decode | None = None,
        stopwatch: Stopwatch | None = None,
        reads_trainer: bool = False,
        schedule_log: ScheduleLog | None = None,
    ) -> None:
        self.model = model
        self._max_length: int = max_length or model.config.max_position_embeddings
        size, can_decode = model.config.vocab_size, decode is not None
        self._checked = partial(
            check_request, vocab_size=size, max_length=self._max_length, can_decode=can_decode
        )
        self._runner = make_runner(model, max_length=self._max_length, kv_cache_bytes=kv_cache_bytes)
        self._engine = Engine(
            self._runner,
            max_length=self._max_length,
            max_concurrency=max_concurrency,
            max_step_tokens=max_step_tokens,
            decode=decode,
        )
        self._max_concurrency = max_concurrency
        self._kv_cache_bytes = kv_cache_bytes
        self._futures: dict[str, asyncio.Future[Finished]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._num_requests = 0
        self._is_closed = False
        self._stopwatch = stopwatch or Stopwatch()
        self.reads_trainer = reads_trainer
        self._schedule_log = schedule_log or ScheduleLog()
        self._has_stepped = asyncio.Event()

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
        partial_ids: Sequence[int] = (),
    ) -> Completion:
        if self._is_closed:
            raise ServerError("the embedded server is closed")
        started = time.perf_counter()
        request = self._checked(prompt_ids, sampling, request_id, media, partial_ids)
        self._engine.add(request)
        self._num_requests += 1
        future: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._futures[request_id] = future
        self._drive_if_needed()
        try:
            _, reason, version = await future
        except asyncio.CancelledError:
            if self._futures.pop(request_id, None) is not None:
                self._engine.abort(request_id)
            raise
        return request.completion(reason, version, time.perf_counter() - started)

    async def abort(self, request_id: str) -> None:
        """If the conversation has a running or waiting request, ends it with the tokens sampled so far."""
        finished = self._engine.abort(request_id)
        if finished is not None:
            self._deliver(finished)

    async def release(self, request_id: str) -> None:
        await self.abort(request_id)
        self._engine.release(request_id)

    async def suspend(self, how: Suspension = "finish") -> None:
        if self._schedule_log.is_followed:
            await self._update_is_due()
        else:
            self._engine.is_admitting = False
        self._engine.is_frozen = how == "keep"
        for finished in self._engine.abort_running() if how == "abort" else ():
            self._deliver(finished)
        if self._driver is not None:
            # The driver ends with the last running request, or at once if frozen. A cancelled wait mustn't
            # cancel the driver.
            await asyncio.shield(self._driver)

    async def resume(self, version: int) -> None:
        self._engine.update(version)
        self._schedule_log.updated(version)
        self._engine.is_admitting, self._engine.is_frozen = True, False
        self._drive_if_needed()

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None:
        """Frees the cache (`kv_cache`). Raises NotAvailableError for any other kind: weights stay in
        memory."""
        await super().sleep(kinds)
        self._engine.free_cache()

    async def close(self) -> None:
        """Fails running and waiting requests, and refuses new ones."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait([self._driver])
        for request_id in list(self._futures):
            self._engine.abort(request_id)
            self._fail(request_id, f"the embedded server was closed while {request_id!r} waited for it")
        self._engine.is_admitting = False
        self._engine.free_cache()

    def info(self) -> ServerInfo:
        return self.describe(
            f"embedded, {self._runner.name} forward pass",
            max_length=self._max_length,
            max_concurrency=self._max_concurrency,
            cache_bytes=self._kv_cache_bytes,
        )

    def _drive_if_needed(self) -> None:
        if self._driver is None and self._may_step:
            self._driver = asyncio.get_running_loop().create_task(self._drive(), name="embedded server")
            self._driver.add_done_callback(self._end)

    async def _drive(self) -> None:
        try:
            while self._may_step:
                await self._let_callers_run()
                self._step()
        finally:
            self._driver = None

    def _end(self, driver: asyncio.Task[None]) -> None:
        """If an error ended the driver (such as a full disk), fails all requests with it, since nobody awaits
        the driver."""
        fault = None if driver.cancelled() else driver.exception()
        for request_id in list(self._futures) if fault is not None else ():
            self._engine.abort(request_id)
            self._fail(request_id, f"the engine broke off while {request_id!r} waited for it: {fault}", fault)

    @property
    def _may_step(self) -> bool:
        """Whether a step has work; in a replay, whether all requests that the next step admits have
        arrived."""
        if not self._schedule_log.is_followed:
            return self._engine.has_work
        admissions = self._schedule_log.admissions
        return admissions is not None and all(
            self._engine.is_waiting(request_id) for request_id, _ in admissions
        )

    async def _update_is_due(self) -> None:
        """Waits for the steps that the record has before its next weight update. Raises DataError if the
        record ends."""
        while self._schedule_log.update is None:
            self._has_stepped.clear()
            await self._has_stepped.wait()

    async def _let_callers_run(self) -> None:
        """Lets all callers that can run submit their next requests before the step, so that batches are
        large."""
        num_requests, quiet_rounds = self._num_requests, 0
        while quiet_rounds < _QUIET_ROUNDS:
            await asyncio.sleep(0)
            quiet_rounds = quiet_rounds + 1 if self._num_requests == num_requests else 0
            num_requests = self._num_requests

    def _step(self) -> None:
        try:
            started, num_sampled = self._stopwatch.now(), self._engine.num_sampled
            self._engine.admissions = self._schedule_log.admissions
            finished = self._engine.step()
            self._stopwatch.add(ENGINE, "step", started, **self._engine.last_step)
            self._stopwatch.num_sampled += self._engine.num_sampled - num_sampled
        except (
            Exception
        ) as error:  # boundary: an exception of the model fails the requests of this batch, not the server
            for request in self._engine.fail_running():
                name = request.request_id
                self._fail(name, f"the engine failed on the batch of conversation {name!r}: {error}", error)
            return
        if self._engine.last_step["batch_size"]:
            self._schedule_log.stepped(self._engine.admitted)
            self._has_stepped.set()
        for item in finished:
            self._deliver(item)

    def _deliver(self, finished: Finished) -> None:
        future = self._futures.pop(finished.request.request_id, None)
        if future is not None and not future.done():
            future.set_result(finished)

    def _fail(self, request_id: str, what: str, cause: BaseException | None = None) -> None:
        future, error = self._futures.pop(request_id, None), ServerError(what)
        error.__cause__ = cause
        if future is not None and not future.done():
            future.set_exception(error)


def make_runner(model: PreTrainedModel, *, max_length: int, kv_cache_bytes: int) -> Runner:
    """A FusedRunner if the model has the shape for it; otherwise a GenericRunner, with the reason in the
    log."""
    obstacle = fast_path_obstacle(model)
    if obstacle is None:
        return FusedRunner(model, max_length=max_length, kv_cache_bytes=kv_cache_bytes)
    logger.warning("The embedded server runs the model's own forward pass, which is slower: %s.", obstacle)
    return GenericRunner(model, max_length=max_length, kv_cache_bytes=kv_cache_bytes)
