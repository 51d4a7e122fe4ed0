"""The plain reference server: transformers' own `generate`, one request after another, one token a call.

One token per call keeps the event loop turning, so that aborts and deadlines work without a thread, and gives every token its
own seed. Only transformers decides how a token is sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from turnwise.errors import ServerError
from turnwise.inference.policy import of_policy
from turnwise.inference.request import Request, check_request, refuse_all_but_cache
from turnwise.inference.weight_transfer import write_weights
from turnwise.models.runtime_info import loaded_model
from turnwise.protocols import MemoryKind, NamedTensors, Suspension
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import ENGINE, Stopwatch
from turnwise.runtime_info import PolicyInfo, ServerInfo
from turnwise.types import Completion, FinishReason, Media, SamplingParams, derive_seed


class HFServer:
    """Samples with `model.generate`, keeping nothing between requests. For checking other servers, not for speed.

    `max_length` bounds contexts (default: the model's own); `decode` turns ids into text, for stop strings. Responses
    include the stop token, or the token that completed a stop string. `reads_trainer` says that the model is the trainer's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_length: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        version: int = 0,
        stopwatch: Stopwatch | None = None,
        reads_trainer: bool = False,
    ) -> None:
        self.model = model
        self.version = version
        self._max_length = max_length or model.config.max_position_embeddings
        self._decode = decode
        self._turn = asyncio.Lock()
        self._active: dict[str, Request] = {}
        self._aborted: set[str] = set()
        self._is_aborting = False
        """Whether the suspension ends running requests."""
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_closed = False
        self._stopwatch = stopwatch or Stopwatch()
        self._reads_trainer = reads_trainer

    @classmethod
    def for_policy(cls, rank: RankContext, policy: PolicyInfo, **options: Any) -> Self:
        """A `protocols.ServerFactory`: it reads the trainer's model where that is a neighbour, else it loads one."""
        return cls(**of_policy(rank, policy), **options)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
        partial_ids: Sequence[int] = (),
    ) -> Completion:
        self._refuse_if_closed(request_id)
        request = check_request(
            prompt_ids,
            sampling,
            request_id,
            media,
            partial_ids,
            vocab_size=self.model.config.vocab_size,
            max_length=self._max_length,
            can_decode=self._decode is not None,
        )
        if request_id in self._active:
            raise ServerError(f"conversation {request_id!r} already has a request in flight; give each its own request_id")
        started = time.perf_counter()
        self._active[request_id] = request
        try:
            reason = None
            while reason is None:
                await self._is_open.wait()
                async with self._turn:
                    # A suspension may have come before this request's turn.
                    reason = await self._run(request) if self._is_open.is_set() else None
        finally:
            del self._active[request_id]
            self._aborted.discard(request_id)
        return request.completion(reason, self.version, time.perf_counter() - started)

    async def abort(self, request_id: str) -> None:
        if request_id in self._active:
            self._aborted.add(request_id)

    async def release(self, request_id: str) -> None:
        await self.abort(request_id)

    async def suspend(self, how: Suspension = "finish") -> None:
        self._is_aborting = how == "abort"
        self._is_open.clear()
        await self._running_request_is_over()

    async def receive(self, weights: NamedTensors) -> int:
        return write_weights(self.model, weights)

    async def resume(self, version: int) -> None:
        self.version = version
        self._is_open.set()

    async def sleep(self, kinds: Iterable[MemoryKind]) -> None:
        refuse_all_but_cache(kinds)

    async def wake(self, kinds: Iterable[MemoryKind]) -> None:
        refuse_all_but_cache(kinds)

    async def close(self) -> None:
        self._is_closed = True
        self._is_open.set()
        await self._running_request_is_over()

    def info(self) -> ServerInfo:
        return ServerInfo(
            model=loaded_model(self.model),
            engine="transformers generate",
            max_length=self._max_length,
            max_concurrency=1,
            needs_weights=not self._reads_trainer,
            sampling_mask=True,
        )

    async def _running_request_is_over(self) -> None:
        """Waits until it has finished, stepped back or noticed that the server is closed."""
        async with self._turn:
            return

    def _refuse_if_closed(self, request_id: str) -> None:
        if self._is_closed:
            raise ServerError(f"the hf server is closed; conversation {request_id!r} can't be served")

    async def _run(self, request: Request) -> FinishReason:
        """Samples until the request is over."""
        cache = None
        while True:
            self._refuse_if_closed(request.request_id)
            if request.request_id in self._aborted or (self._is_aborting and not self._is_open.is_set()):
                return "aborted"
            started = self._stopwatch.now()
            cache = self._sample_token(request, cache)
            self._stopwatch.add(ENGINE, "token", started)
            self._stopwatch.num_sampled += 1
            reason = self._finish_reason(request)
            if reason is not None:
                return reason
            await asyncio.sleep(0)

    def _sample_token(self, request: Request, cache: Any) -> Any:
        """Appends one token to the request's and returns the cache of what came before it."""
        sampling = request.sampling
        seed = derive_seed("token", sampling.seed, len(request.response_ids))
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        was_training = self.model.training
        self.model.eval()
        context = torch.from_numpy(np.concatenate((request.prompt_ids, request.response_ids)))[None].to(self.model.device)
        with torch.random.fork_rng(devices=devices), torch.inference_mode():
            torch.manual_seed(seed)
            output = self.model.generate(
                context,
                attention_mask=torch.ones_like(context),
                past_key_values=cache,
                generation_config=_generation_config(sampling),
            )
        self.model.train(was_training)
        token = int(output.sequences[0, -1])
        logprob = 0.0 if sampling.is_greedy else _logprob(output.scores[0][0], token)
        if sampling.keeps_ids:
            request.kept.append(output.scores[0][0].isfinite().nonzero()[:, 0].int().cpu().numpy())
        request.token_ids = np.append(request.token_ids, token)
        request.logprobs = np.append(request.logprobs, np.float32(logprob))
        return output.past_key_values

    def _finish_reason(self, request: Request) -> FinishReason | None:
        sampling, ids = request.sampling, request.response_ids
        if int(ids[-1]) in sampling.stop_token_ids:
            return "stop"
        if sampling.stop_strings and self._decode is not None:
            text = self._decode(ids.tolist())
            if any(stop in text for stop in sampling.stop_strings):
                return "stop"
        is_spent = len(ids) >= sampling.max_new_tokens or len(request.prompt_ids) + len(ids) >= self._max_length
        return "length" if is_spent else None


def _generation_config(sampling: SamplingParams) -> GenerationConfig:
    """One token under these parameters, every one of them set, so that a model's own defaults don't slip in."""
    drawn = (
        {}
        if sampling.is_greedy
        else {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    )
    return GenerationConfig(
        do_sample=not sampling.is_greedy,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=1,
        use_cache=True,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **drawn,
    )


def _logprob(scores: Tensor, token: int) -> float:
    return float(torch.log_softmax(scores.float(), -1)[token])
