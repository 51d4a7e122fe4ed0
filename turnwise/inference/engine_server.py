"""The common part of the servers that leave sampling to another library: transformers, vLLM or SGLang."""

import asyncio
import itertools
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from turnwise.errors import NotAvailableError, ServerError
from turnwise.inference.policy import decoder
from turnwise.inference.request import Decode, Request, append_run, check_request
from turnwise.model_files.folder import base_of_adapter
from turnwise.models.load import parse_dtype
from turnwise.models.loaded_model import bare_model, loaded_model
from turnwise.protocols import MemoryKind, Suspension, WeightSource
from turnwise.runtime.info import EVERY_SUSPENSION, PolicyInfo, ServerInfo
from turnwise.runtime.rank import RankContext
from turnwise.transfer.files import folder_of
from turnwise.transfer.manifest import WeightManifest
from turnwise.transfer.receiver import manifest_of_model
from turnwise.types import Completion, FinishReason, Media, SamplingParams, VersionRun

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
"""Maps the finish reasons of vLLM and SGLang to turnwise's."""
_REPEAT_ABORT_S = 0.1  # until an abort is repeated: an engine ignores one that arrives before its request
_ABORT_S = 5.0  # maximum seconds for the abort of a cancelled request: a deadline may have cancelled it
_MISSING_LOGPROB = -9999.0  # SGLang's number for a log-prob that it doesn't have


class Sampled(NamedTuple):
    """An engine's answer to a request."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reason: FinishReason
    versions: Sequence[tuple[str, int]] = ()
    """`(label of the weights, number of consecutive tokens sampled with them)`, in order. Tokens beyond these
    count as sampled by the weights that the request began with."""
    kept_ids: Sequence[Any] = ()
    """For each token, the ids that it was drawn from; empty if the engine doesn't return them."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request in the engine."""

    engine_id: str
    """Unique to this request, whereas the conversation's id recurs with each turn."""
    version: int
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_aborted: bool = False


class RequestServer(ABC):
    """Base of servers that pass each request to an engine. It checks requests, and holds them back while
    weights change. Contexts have up to `max_length` tokens. `decode` turns token ids into text; without it,
    requests with stop strings are refused."""

    name: str
    """The server's name in error messages."""

    def __init__(self, vocab_size: int, max_length: int, decode: Decode | None) -> None:
        self.version = 0
        self._max_length = max_length
        self._decode = decode
        self._checked = partial(
            check_request,
            vocab_size=vocab_size,
            max_length=max_length,
            can_decode=decode is not None,
        )
        self._numbers = itertools.count()
        self._running: dict[str, _Running] = {}
        self._waiting: dict[str, bool] = {}
        """Request id → whether it was aborted while requests were held back."""
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_closed = False
        self._is_frozen = False

    @abstractmethod
    async def _sample(self, engine_id: str, request: Request) -> Sampled:
        """Samples the response's tokens after `request.partial_ids`. Raises ServerError if the engine refuses
        this request, ConnectionError if the engine has ended."""

    @abstractmethod
    async def _abort(self, engine_id: str) -> None:
        """Asks the engine to end a request. `_sample` then returns the tokens so far, with reason
        `aborted`."""

    @abstractmethod
    async def _freeze(self) -> None:
        """Stops sampling. Running requests and their KV stay."""

    @abstractmethod
    async def _thaw(self) -> None:
        """Continues sampling after `_freeze`."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
        partial_ids: Sequence[int] = (),
    ) -> Completion:
        started = time.perf_counter()
        self._refuse_if_closed(request_id)
        request = self._checked(prompt_ids, sampling, request_id, media, partial_ids)
        if request_id in self._running or request_id in self._waiting:
            raise ServerError(
                f"conversation {request_id!r} already has a request in flight; give each its own request_id"
            )
        self._waiting[request_id] = False
        try:
            await self._is_open.wait()
            self._refuse_if_closed(request_id)
        finally:
            is_aborted = self._waiting.pop(request_id)
        if is_aborted:
            return request.completion("aborted", self.version, time.perf_counter() - started)
        running = _Running(f"{request_id}#{next(self._numbers)}", self.version)
        self._running[request_id] = running
        try:
            sampled = await self._sample(running.engine_id, request)
        except asyncio.CancelledError:
            with suppress(Exception):  # the engine would go on sampling for nobody
                await asyncio.wait_for(self._abort(running.engine_id), _ABORT_S)
            raise
        finally:
            del self._running[request_id]
            running.ended.set_result(None)
        self._refuse_if_closed(request_id)
        if sampled.reason == "aborted" and not running.is_aborted:
            raise ServerError(
                f"{self.name} gave up the request of conversation {request_id!r}; its log says why"
            )
        return self._completion(request, sampled, running.version, time.perf_counter() - started)

    async def abort(self, request_id: str) -> None:
        if request_id in self._waiting:
            self._waiting[request_id] = True
        await self._abort_all([request_id])

    async def release(self, request_id: str) -> None:
        """Aborts the conversation's request. The engine drops caches by itself when it needs room."""
        await self.abort(request_id)

    async def suspend(self, suspension: Suspension = "finish") -> None:
        self._is_open.clear()
        if suspension == "keep":
            self._is_frozen = True
            await self._freeze()
        elif suspension == "abort":
            await self._abort_all(list(self._running))
        elif self._running:
            await asyncio.wait([running.ended for running in self._running.values()])

    async def resume(self, version: int) -> None:
        self.version = version
        if self._is_frozen:
            self._is_frozen = False
            await self._thaw()
        self._is_open.set()

    async def close(self) -> None:
        self._is_closed = True
        self._is_open.set()
        await self._abort_all(list(self._running))

    def _refuse_if_closed(self, request_id: str) -> None:
        if self._is_closed:
            raise ServerError(f"{self.name} is closed; conversation {request_id!r} can't be served")

    async def _abort_all(self, request_ids: Iterable[str]) -> None:
        unfinished = [self._running[request_id] for request_id in request_ids if request_id in self._running]
        while unfinished := [running for running in unfinished if not running.ended.done()]:
            for running in unfinished:
                running.is_aborted = True
                await self._abort(running.engine_id)
            await asyncio.wait([running.ended for running in unfinished], timeout=_REPEAT_ABORT_S)

    def _completion(
        self,
        request: Request,
        sampled: Sampled,
        version: int,
        generate_s: float,
    ) -> Completion:
        token_ids = np.array(sampled.token_ids, np.int64)
        logprobs = np.array(sampled.logprobs, np.float32)
        if request.sampling.is_greedy:
            logprobs = np.zeros(len(token_ids), np.float32)
        has_logprob = np.isfinite(logprobs) & (logprobs > _MISSING_LOGPROB)
        is_whole = len(logprobs) == len(token_ids) and len(sampled.kept_ids) in (0, len(token_ids))
        if not is_whole or not has_logprob.all():
            raise ServerError(
                f"{self.name} gave {len(token_ids)} tokens for conversation {request.request_id!r}, and not "
                "every one has a log-prob; a policy can't be trained on them"
            )
        length = self._stop_across(request, token_ids)
        reason: FinishReason = "stop"
        if length is None:
            length = len(token_ids)
            reason = sampled.reason
        request.token_ids = token_ids[:length]
        request.logprobs = logprobs[:length]
        request.versions = _version_runs(sampled.versions, length, version)
        request.kept_ids = [np.array(ids, np.int32) for ids in sampled.kept_ids[:length]]
        return request.completion(reason, version, generate_s)

    def _stop_across(self, request: Request, token_ids: np.ndarray) -> int | None:
        """The number of `token_ids` up to the end of the response's first stop string. None without a stop
        string, or if the request has no partial tokens: the engine itself finds every stop string that
        doesn't begin in the partial tokens."""
        num_partial = len(request.partial_ids)
        if num_partial == 0:
            return None
        response_ids = np.concatenate((request.partial_ids, token_ids))
        for length in range(1, len(token_ids) + 1):
            if request.hits_stop_string(response_ids[: num_partial + length], self._decode):
                return length
        return None


def _version_runs(
    labelled: Sequence[tuple[str, int]],
    length: int,
    first_version: int,
) -> tuple[VersionRun, ...]:
    """The versions of the first `length` tokens. Weights that an engine began with have no label of ours;
    they are `first_version`."""
    runs: tuple[VersionRun, ...] = ()
    for label, count in labelled:
        version = int(label) if label.isdigit() else first_version
        num_labelled = sum(run.num_tokens for run in runs)
        runs = append_run(runs, version, min(count, length - num_labelled))
    return runs


class EngineServer(RequestServer):
    """A `protocols.InferenceServer` around vLLM or SGLang. Cached prefixes are marked with the number of the
    weight update, so no new request reads a prefix of older weights. Weights reach the engine as a
    safetensors file in memory that all replicas of a node share."""

    def __init__(self, rank: RankContext, policy: PolicyInfo) -> None:
        super().__init__(policy.vocab_size, policy.max_context, decoder(policy))
        self._policy = policy
        self._device = rank.device
        self._model = bare_model(policy)
        self._manifest = manifest_of_model(self._model)
        self._num_updates = 0

    @abstractmethod
    async def _load(self, folder: Path) -> None:
        """Makes the engine load the weights in a folder. Raises ModelError if they don't fit."""

    @abstractmethod
    async def _label(self, version: str) -> None:
        """Labels the engine's weights; `Sampled.versions` repeats the label."""

    @abstractmethod
    async def _end(self) -> None:
        """Ends the engine's processes."""

    @property
    def _mark(self) -> str:
        """Key of the engine's prefix cache; a new one after each weight update, so that older prefixes aren't
        reused."""
        return str(self._num_updates)

    async def begin_update(self, manifest: WeightManifest) -> None:
        """See `InferenceServer`. The engine itself would ignore a missing tensor."""
        manifest.check_fits(self._manifest, self.name)

    async def receive(self, weights: WeightSource) -> int:
        dtype = str(parse_dtype(self._policy.dtype)).removeprefix("torch.")
        folder = await asyncio.to_thread(folder_of, weights, dtype)
        try:
            await self._load(folder.path)
        finally:
            folder.remove()
        self._num_updates += 1
        return folder.num_bytes

    async def resume(self, version: int) -> None:
        await self._label(str(version))
        await super().resume(version)

    async def close(self) -> None:
        if self._is_closed:
            return
        try:
            await super().close()
        finally:
            await self._end()

    def info(self) -> ServerInfo:
        return self._served

    def _describe(
        self,
        engine: str,
        max_concurrency: int,
        cache_bytes: int,
        sleeps: bool,
        sampling_mask: bool,
    ) -> None:
        self._sleeps = sleeps
        model = replace(
            loaded_model(self._model),
            num_trainable=0,
            dtype=self._policy.dtype,
            attention=engine,
            device=self._device,
        )
        kinds: set[MemoryKind] = {"kv_cache", "weights"} if sleeps else {"kv_cache"}
        self._served = ServerInfo(
            model=model,
            engine=engine,
            max_length=self._policy.max_context,
            max_concurrency=max_concurrency,
            cache_bytes=cache_bytes,
            sleeps=frozenset(kinds),
            suspensions=EVERY_SUSPENSION,
            weight_versions=True,
            sampling_mask=sampling_mask,
        )


def engine_folder(policy: PolicyInfo, name: str) -> str:
    """The folder from which the engine `name` loads the policy. Raises NotAvailableError if the policy is an
    adapter."""
    if base_of_adapter(policy.path) is not None:
        raise NotAvailableError(
            f"{name} can't load the adapter in {policy.path}; merge it with turnwise export, or sample with "
            "actor_infer.strategy_args.strategy_name: embedded"
        )
    return str(policy.trust.folder(policy.path))


def require_version(name: str, installed: str, supported: str) -> None:
    """Raises NotAvailableError unless the engine's version `installed` begins with the version `supported`,
    as 0.32.1 with 0.32."""
    if not re.match(rf"{re.escape(supported)}(?!\d)", installed):
        raise NotAvailableError(
            f"{name} {installed} is installed; turnwise works with {supported}: install it, or sample with "
            "actor_infer.strategy_args.strategy_name: embedded"
        )
