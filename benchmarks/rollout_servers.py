"""The others of `rollout.py` behind the call that conversations make: transformers' `generate`, and vLLM on a
CPU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from turnwise.types import Completion, FinishReason, IntArray, SamplingParams, VersionRun

QUIET_ROUNDS = 20
"""Turns of the event loop without a new request after which all live episodes have asked."""


class GenerateServer:
    """One `generate` call for all requests that are waiting, padded on the left: a lockstep loop over live
    episodes.

    It computes every context anew at every turn, as `generate` does. It isn't asked for log-probs, which
    would cost it more.
    """

    def __init__(self, model: PreTrainedModel, pad_id: int) -> None:
        self._model = model
        self._pad_id = pad_id
        self._waiting: list[tuple[Sequence[int], SamplingParams, asyncio.Future[Completion]]] = []
        self._driver: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, request_id: str, media: Any = ()
    ) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt_ids, sampling, future))
        if self._driver is None:
            self._driver = asyncio.create_task(self._answer_all())
        return await future

    async def release(self, request_id: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is held."""

    async def _answer_all(self) -> None:
        num_waiting, quiet = 0, 0
        while quiet < QUIET_ROUNDS:
            quiet = quiet + 1 if num_waiting == len(self._waiting) else 0
            num_waiting = len(self._waiting)
            await asyncio.sleep(0)
        batch, self._waiting, self._driver = self._waiting, [], None
        self._run(batch)

    def _run(self, batch: list[tuple[Sequence[int], SamplingParams, asyncio.Future[Completion]]]) -> None:
        width = max(len(prompt_ids) for prompt_ids, _, _ in batch)
        input_ids = np.full((len(batch), width), self._pad_id, np.int64)
        for row, (prompt_ids, _, _) in enumerate(batch):
            input_ids[row, width - len(prompt_ids) :] = prompt_ids
        is_token = np.arange(width) >= np.array([[width - len(prompt_ids)] for prompt_ids, _, _ in batch])
        sampling = batch[0][1]
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.from_numpy(input_ids),
                attention_mask=torch.from_numpy(is_token).long(),
                do_sample=True,
                temperature=sampling.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(asked.max_new_tokens for _, asked, _ in batch),
                eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=self._pad_id,
            )
        for row, (_, asked, future) in enumerate(batch):
            future.set_result(completion(output[row, width:].numpy()[: asked.max_new_tokens], asked))


class VLLMServer:
    """vLLM's asynchronous engine, in its own process as it always is, with prefix caching and the log-prob of
    each token."""

    def __init__(self, folder: str, *, dtype: str, max_length: int, arguments: Mapping[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=folder,
                dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
                max_model_len=max_length,
                **{
                    "max_num_seqs": 256,
                    "block_size": 32,
                    "enable_prefix_caching": True,
                    "enforce_eager": True,
                    "disable_log_stats": True,
                    **arguments,
                },
            )
        )
        self._num_requests = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, request_id: str, media: Any = ()
    ) -> Completion:
        from vllm import SamplingParams as VLLMSampling
        from vllm.sampling_params import RequestOutputKind

        asked = VLLMSampling(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=not sampling.stop_token_ids,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._num_requests += 1
        prompt = {"prompt_token_ids": list(prompt_ids)}
        async for output in self._engine.generate(prompt, asked, f"{request_id}#{self._num_requests}"):
            token_ids = output.outputs[0].token_ids
        return completion(np.array(token_ids, np.int64), sampling)

    async def release(self, request_id: str) -> None:
        """Its blocks are freed when others need them."""

    async def reset_cache(self) -> None:
        """As after a weight update: no round finds what an earlier one computed."""
        await self._engine.reset_prefix_cache()

    async def close(self) -> None:
        self._engine.shutdown()


def completion(token_ids: IntArray, sampling: SamplingParams) -> Completion:
    """Tokens up to the first stop token, which is kept. Log-probs are left out: nobody reads them here."""
    stops = np.flatnonzero(np.isin(token_ids, sampling.stop_token_ids))
    reason: FinishReason = "stop" if len(stops) else "length"
    token_ids = token_ids[: stops[0] + 1] if len(stops) else token_ids
    return Completion(
        token_ids, np.zeros(len(token_ids), np.float32), reason, (VersionRun(0, len(token_ids)),)
    )
