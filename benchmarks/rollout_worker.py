"""One contender of `rollout.py` in a process of its own: reads names of workloads, answers each with a line
of JSON.

`multi_turn` plays FrozenLake as `examples/frozen_lake/agentic.yaml` has it, `single_turn` answers random
prompts of 200 tokens with 64, and `limits` (embedded only) measures prefill and decode alone, and what of the
machine they use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable
from typing import Any

import numpy as np
import torch
from frozen_lake_player import Player
from rollout_limits import measure_limits
from rollout_servers import GenerateServer, VLLMServer
from toy import parse_arguments

from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.models.load import DTYPES, load_model, load_tokenizer
from turnwise.runtime.event_loop import seldom_collecting
from turnwise.types import SamplingParams

GROUP_SIZE = 8
PROMPT_TOKENS = 200
MAX_LENGTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=("embedded", "generate", "vllm"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--vllm-arguments", type=json.loads, default={})
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, help="of an episode; default: the example's")
    parser.add_argument("--gemm-size", type=int, default=2048)
    options = parse_arguments(parser, groups=1, prompts=2, new_tokens=4, turns=2, gemm_size=128)
    with seldom_collecting():  # as a run's event loop has it
        asyncio.run(serve(options))


async def serve(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    worker = Worker(options)
    print(json.dumps({"ready": True}), flush=True)
    num_rounds = 0
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        num_rounds += 1
        if line == "limits":
            print(json.dumps(worker.limits()), flush=True)
            continue
        await worker.forget()
        play = {"multi_turn": worker.multi_turn, "single_turn": worker.single_turn}[line]
        started = time.perf_counter()
        num_tokens = await play(num_rounds)
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": num_tokens}), flush=True)
    await worker.server.close()


class Worker:
    """A server and what it is asked about."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        tokenizer = load_tokenizer(options.model)
        self.model = load_model(options.model, dtype=DTYPES[options.dtype]).eval()
        self.server: Any = None
        if options.contender == "embedded":
            self.server = EmbeddedServer(self.model, max_length=MAX_LENGTH)
        elif options.contender == "generate":
            self.server = GenerateServer(self.model, tokenizer.pad_token_id)
        else:
            self.server = VLLMServer(
                options.model, dtype=options.dtype, max_length=MAX_LENGTH, arguments=options.vllm_arguments
            )
        sizes = {"max_length": MAX_LENGTH, "partition": options.groups, "max_steps": options.turns}
        self.player = Player(options.model, self.model, **sizes)

    async def forget(self) -> None:
        """What is cached is forgotten, as after a weight update: every round begins with nothing."""
        if isinstance(self.server, EmbeddedServer):
            await self.server.suspend()
            await self.server.resume(self.server.version + 1)
        elif isinstance(self.server, VLLMServer):
            await self.server.reset_cache()

    async def multi_turn(self, number: int) -> int:
        """Plays a step's episodes; the sampled tokens."""
        trajectories = await self.player.play(
            self.server, range(self.options.groups), GROUP_SIZE, seed=number
        )
        return sum(len(turn.response_ids) for trajectory in trajectories for turn in trajectory.turns)

    async def single_turn(self, number: int) -> int:
        """Answers prompts that have nothing in common; the sampled tokens."""
        rng = np.random.default_rng(number)
        prompts = rng.integers(
            0, self.model.config.vocab_size, (self.options.prompts, PROMPT_TOKENS)
        ).tolist()

        async def answer(index: int) -> int:
            sampling, name = SamplingParams(self.options.new_tokens, seed=index), f"{number}/{index}"
            completion = await self.server.generate(prompts[index], sampling, name)
            await self.server.release(name)
            return len(completion.token_ids)

        answers: list[Awaitable[int]] = [answer(index) for index in range(self.options.prompts)]
        return sum(await asyncio.gather(*answers))

    def limits(self) -> dict[str, float]:
        """See `rollout_limits`."""
        return measure_limits(
            self.model, self.options.prompts, PROMPT_TOKENS, self.options.new_tokens, self.options.gemm_size
        )


if __name__ == "__main__":
    main()
