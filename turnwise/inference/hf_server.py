"""The plain reference server. It serves one request after another. Each call of transformers' `generate`
samples one token, so the event loop keeps running between tokens, aborts and deadlines work without a thread,
and every token has its own seed."""

import asyncio
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from turnwise.inference.engine_server import RequestServer, Sampled
from turnwise.inference.policy import HoldsModel
from turnwise.inference.request import Decode, Request, append_run
from turnwise.runtime.info import ServerInfo
from turnwise.runtime.stopwatch import ENGINE, Stopwatch
from turnwise.types import FinishReason, SamplingParams, derive_seed


class HFServer(HoldsModel, RequestServer):
    """Samples with `model.generate` and keeps no KV between requests. It is meant for checks of other
    servers, not for speed. Contexts have up to `max_length` tokens (default: the model's limit). Responses
    include the stop token, or the token that completed a stop string."""

    name = "the hf server"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_length: int | None = None,
        decode: Decode | None = None,
        stopwatch: Stopwatch | None = None,
        reads_trainer: bool = False,
    ) -> None:
        max_length = max_length or model.config.max_position_embeddings
        super().__init__(model.config.vocab_size, max_length, decode)
        self.model = model
        self.reads_trainer = reads_trainer
        self._turn = asyncio.Lock()  # held by the request that is being sampled
        self._has_changed = asyncio.Event()
        """Wakes a paused request, which then checks whether it may go on or has been aborted."""
        self._stopwatch = stopwatch or Stopwatch()

    def info(self) -> ServerInfo:
        return self.describe("transformers generate", max_length=self._max_length, max_concurrency=1)

    async def _abort(self, engine_id: str) -> None:
        self._has_changed.set()

    async def _freeze(self) -> None:
        """Does nothing: the next token waits while `_is_frozen`."""

    async def _thaw(self) -> None:
        self._has_changed.set()

    async def _sample(self, engine_id: str, request: Request) -> Sampled:
        running = self._running[request.request_id]
        reason: FinishReason | None = None
        cache: Any = None
        async with self._turn:
            while reason is None and not running.is_aborted:
                if self._is_frozen:
                    self._has_changed.clear()
                    await self._has_changed.wait()
                    continue
                request.versions = append_run(request.versions, self.version, 1)
                started = self._stopwatch.now()
                cache = self._sample_token(request, cache)
                self._stopwatch.add(ENGINE, "token", started)
                self._stopwatch.num_sampled += 1
                reason = self._finish_reason(request)
                await asyncio.sleep(0)
        versions = [(str(version), num_tokens) for version, num_tokens in request.versions]
        return Sampled(
            request.token_ids.tolist(),
            request.logprobs.tolist(),
            reason or "aborted",
            versions,
            request.kept_ids,
        )

    def _sample_token(self, request: Request, cache: Any) -> Any:
        """Samples one token, appends it to the request, and returns the KV cache of the tokens before it."""
        sampling = request.sampling
        device = self.model.device
        forked_devices = [device] if device.type == "cuda" else []
        was_training = self.model.training
        self.model.eval()
        context_ids = np.concatenate((request.context_ids, request.token_ids))
        context = torch.from_numpy(context_ids)[None].to(device)
        with torch.random.fork_rng(devices=forked_devices), torch.inference_mode():
            torch.manual_seed(derive_seed("token", sampling.seed, len(request.response_ids)))
            output = self.model.generate(
                context,
                attention_mask=torch.ones_like(context),
                past_key_values=cache,
                generation_config=_generation_config(sampling),
            )
        self.model.train(was_training)
        token = int(output.sequences[0, -1])
        scores = output.scores[0][0].float()
        if sampling.keeps_ids:
            kept_ids = scores.isfinite().nonzero()[:, 0]
            request.kept_ids.append(kept_ids.int().cpu().numpy())
        request.token_ids = np.append(request.token_ids, token)
        logprob = torch.log_softmax(scores, -1)[token].item()
        request.logprobs = np.append(request.logprobs, np.float32(logprob))
        return output.past_key_values

    def _finish_reason(self, request: Request) -> FinishReason | None:
        ids = request.response_ids
        if int(ids[-1]) in request.sampling.stop_token_ids or request.hits_stop_string(ids, self._decode):
            return "stop"
        max_tokens = min(request.sampling.max_new_tokens, self._max_length - len(request.prompt_ids))
        return "length" if len(ids) >= max_tokens else None


def _generation_config(sampling: SamplingParams) -> GenerationConfig:
    """The config for one token. It also sets parameters that are off, since transformers reads unset ones
    from the model's own generation config."""
    drawing: dict[str, Any] = {}
    if not sampling.is_greedy:
        drawing = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }
    return GenerationConfig(
        do_sample=not sampling.is_greedy,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=1,
        use_cache=True,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **drawing,
    )
