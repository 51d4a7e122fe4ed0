"""vLLM behind `InferenceServer`, for real: the contract suite of servers, and what only an engine in another
process can break.

One engine serves all checks. Before each, it gets the weights that the check begins with.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import server_contract as contract
import torch
from letters import letter_model
from transformers import PreTrainedModel

from turnwise.errors import ConfigError, ModelError, ReplicasDeadError
from turnwise.inference.server_manager import LLMServerManager
from turnwise.inference.vllm_server import VLLMServer
from turnwise.models.load import policy_info
from turnwise.runtime.info import PolicyInfo
from turnwise.runtime.rank import RankContext
from turnwise.transfer.live import manifest_of
from turnwise.types import SamplingParams, VersionRun

ENGINES_OWN = (contract.a_continuation_draws_the_same, contract.stop_strings_need_text)
"""What is asked only of servers that seed each token and are handed a `decode`."""
MAX_LENGTH = 512
BLOCK = 128
"""Tokens of a block of the prefix cache on a CPU."""
contract.mean_bound = 1e-5


class KeptEngine:
    """The engine, which a server that is closed leaves running. `num_cached` has the prompt tokens of each
    answered request that came from the prefix cache."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.num_cached: list[int] = []

    async def generate(self, *request: Any) -> AsyncIterator[Any]:
        async for answer in self.engine.generate(*request):
            self.num_cached.append(answer.num_cached_tokens)
            yield answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def shutdown(self, timeout: float) -> None: ...


class Slow(VLLMServer):
    async def let_it_sample(self) -> None:
        await asyncio.sleep(0.05)


async def logprobs_after_updates(server: VLLMServer, model: PreTrainedModel) -> None:
    """Prompts longer than a block of the prefix cache, whose prefixes older weights have computed; the second
    time from it. Every other response is drawn from the whole vocabulary, the rest from what top-k and top-p
    leave of it."""
    differences: dict[bool, list[np.ndarray]] = {False: [], True: []}
    prompts = contract.prompts_of(model, 4, low=200, high=300)
    for version in (1, 2, 3):
        for is_again in (False, True):
            choices = [
                SamplingParams(20, temperature=0.7 + 0.3 * index, seed=version)
                for index in range(len(prompts))
            ]
            choices[1::2] = [replace(sampling, top_k=20, top_p=0.8) for sampling in choices[1::2]]
            asked = [
                server.generate(p, s, f"v{version}.{i}")
                for i, (p, s) in enumerate(zip(prompts, choices, strict=True))
            ]
            for p, s, completion in zip(prompts, choices, await asyncio.gather(*asked), strict=True):
                assert completion.versions == (VersionRun(version - 1, 20),)
                expected = contract.reference_logprobs(model, p, completion.token_ids, s)
                differences[s.is_truncated].append(np.abs(completion.logprobs - expected))
            num_cached = server._engine.num_cached[-len(prompts) :]
            assert not is_again or min(num_cached) >= BLOCK, (
                f"prompt tokens from the prefix cache: {num_cached}"
            )
        await server.suspend()
        contract.perturb(model)
        await contract._update(server, model, version)
    for is_cut, those in differences.items():
        worst, mean = max(map(np.max, those)), np.mean(those)
        under = "top_k 20, top_p 0.8" if is_cut else "the whole vocabulary"
        print(f"  log-probs over three updates, {under}: |Δ| mean {mean:.1e}, max {worst:.1e}")
        assert mean <= 1e-5 and worst <= 1e-3


async def keeps_requests_over_an_update(server: VLLMServer, model: PreTrainedModel) -> None:
    [prompt] = contract.prompts_of(model, 1, low=200, high=201)
    sampling = SamplingParams(250, seed=4)
    task = asyncio.create_task(server.generate(prompt, sampling, "kept"))
    await asyncio.sleep(0.3)
    await server.suspend("keep")
    assert not task.done()
    before = deepcopy(model)
    contract.perturb(model)
    held = asyncio.create_task(server.generate(prompt, SamplingParams(5, seed=5), "new"))
    await contract._update(server, model, 8)
    kept, new = await asyncio.gather(task, held)
    (old, num_old), (version, num_new) = kept.versions
    assert (old, version, num_old + num_new) == (0, 8, 250) and num_old > 0 and num_new > 0
    assert new.versions == (VersionRun(8, 5),)
    contract.assert_logprobs(model, prompt, new, SamplingParams(5))
    contract.assert_frozen(before, model, prompt, kept, sampling)


async def aborts_leave_partial_tokens(server: VLLMServer, model: PreTrainedModel) -> None:
    sampling = SamplingParams(400, seed=6)
    for wait_s in (
        0.3,
        1.0,
        3.0,
    ):  # Who else uses the processor decides which of these meets a response in the middle.
        tasks = [asyncio.create_task(server.generate([5, 6, 7], sampling, f"a{index}")) for index in range(4)]
        await asyncio.sleep(wait_s)
        await server.suspend("abort")
        await server.resume(0)
        cuts = [
            cut
            for cut in await asyncio.gather(*tasks)
            if cut.finish_reason == "aborted" and len(cut.token_ids)
        ]
        for cut in cuts:
            contract.assert_logprobs(model, [5, 6, 7], cut, sampling)
        if cuts:
            return
    raise AssertionError("no response was met in the middle")


async def a_continuation_draws_anew(server: VLLMServer, model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_parameter(
            "model.norm.weight"
        ).zero_()  # every token is as probable as any other: equal noise, equal tokens
    await server.suspend()
    await contract._update(server, model, 1)
    sampling = SamplingParams(60, seed=3)
    whole = await server.generate([5], sampling, "whole")
    rest = await server.generate([5], sampling, "rest", partial_ids=whole.token_ids[:30].tolist())
    assert (rest.token_ids == whole.token_ids[:30]).mean() < 0.5


async def weights_that_miss_a_tensor_are_refused(server: VLLMServer, model: PreTrainedModel) -> None:
    weights = model.state_dict()
    for missing in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        try:
            await server.begin_update(
                manifest_of((name, tensor) for name, tensor in weights.items() if name != missing)
            )
        except ModelError as error:
            assert missing in str(error)
        else:
            raise AssertionError(f"{missing} wasn't missed")


async def many_long_prompts_at_once(server: VLLMServer, model: PreTrainedModel) -> None:
    """More than one step of the engine computes. Cut into pieces, seeded requests kill its CPU build."""
    prompts = contract.prompts_of(model, 48, low=300, high=500)
    asked = [
        server.generate(prompt, SamplingParams(4, seed=index), f"m{index}")
        for index, prompt in enumerate(prompts)
    ]
    for prompt, completion in zip(prompts, await asyncio.gather(*asked), strict=True):
        contract.assert_logprobs(model, prompt, completion, SamplingParams(4))


LONG = (
    many_long_prompts_at_once,
    logprobs_after_updates,
    keeps_requests_over_an_update,
    aborts_leave_partial_tokens,
    a_continuation_draws_anew,
    weights_that_miss_a_tensor_are_refused,
)


def refusals(policy: PolicyInfo) -> None:
    for options, said in (
        ({"gpu_memory": 0.5}, "unexpected keyword argument 'gpu_memory'"),
        ({"max_model_len": 100}, "max_model_len: 100 is less than sequence_length 512"),
        ({"kv_cache_memory_bytes": 1000}, "vLLM didn't start"),
    ):
        try:
            VLLMServer.for_policy(RankContext(), policy, **options)
        except ConfigError as error:
            print(f"  refused: {error}")
            assert said in str(error), error
        else:
            raise AssertionError(options)


async def main(folder: Path, only: list[str]) -> int:
    model = letter_model(folder)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    policy = policy_info(str(folder), "fp32", MAX_LENGTH)
    refusals(policy)
    started = time.monotonic()
    first = VLLMServer.for_policy(RankContext(), policy, kv_cache_memory_bytes=2**28)
    print(f"vLLM started in {time.monotonic() - started:.0f} s: {first.info()}", flush=True)
    engine = KeptEngine(first._engine)

    def make_server(_: PreTrainedModel, max_length: int, decode: object = None) -> Slow:
        return Slow(RankContext(), replace(policy, max_context=max_length), engine)

    async def begin() -> None:
        model.load_state_dict(weights)
        await first.suspend()
        await contract._update(first, model, 0)
        await first.sleep(["kv_cache"])

    failed = []
    for check in (*contract.CHECKS, *LONG):
        if check in ENGINES_OWN or (only and check.__name__ not in only):
            continue
        await begin()
        started = time.monotonic()
        try:
            arguments = (make_server(model, MAX_LENGTH), model) if check in LONG else (make_server, model)
            await asyncio.wait_for(check(*arguments), 120)
        except Exception:
            traceback.print_exc()
            failed.append(check.__name__)
        print(f"  {check.__name__}: {time.monotonic() - started:.1f} s", flush=True)
    first._engine.engine_core.resources.engine_manager.processes[0].kill()
    try:
        await LLMServerManager([first]).generate([1, 2], SamplingParams(400), "dies")
    except ReplicasDeadError as error:
        assert "vLLM's engine has ended" in str(error), error
    else:
        failed.append("an engine that dies")
    del engine.engine
    await first.close()
    print(f"vllm: {len(failed)} checks failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(asyncio.run(main(Path(scratch), sys.argv[1:])))
