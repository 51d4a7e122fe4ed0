"""How evenly four replicas are loaded, by simulation over the real manager: `python benchmarks/balance.py`.

2,000 conversations, 128 at once, of log-normal length (σ 1.5), in turns with a pause for the environment
between them. A replica samples one token a tick for each of its requests. Time is simulated; routing is that
of `LLMServerManager`, beside three others. Tokens in flight are those of the contexts that are being sampled.
Reported: by how much the time averages of single replicas differ from their mean, and the worst of all seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from machine import describe_machine
from toy import parse_arguments

from turnwise.inference.server_manager import LLMServerManager
from turnwise.testing.fakes import ScriptedServer
from turnwise.types import Completion, Media, SamplingParams, VersionRun

NUM_REPLICAS, AT_ONCE, SIGMA = 4, 128, 1.5
MEDIAN_TOKENS, PROMPT_TOKENS, MAX_TURN, MAX_TOKENS = 600, 100, 256, 32_768
QUIET_ROUNDS = 12
"""Turns of the event loop after which nobody has anything left to do at this tick."""


@dataclass
class Clock:
    """Simulated time: it moves on to the next event when every coroutine waits for one."""

    now: float = 0.0
    events: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def sleep(self, ticks: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self.events, (self.now + ticks, next(self.numbers), future))
        await future

    async def run(self, main: asyncio.Future[object]) -> None:
        while not main.done():
            for _ in range(QUIET_ROUNDS):
                await asyncio.sleep(0)
            if self.events:
                self.now, _, future = heapq.heappop(self.events)
                future.set_result(None)


class Replica(ScriptedServer):
    """Takes a tick a token, and adds up its tokens in flight over time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__([])
        self.clock = clock
        self.token_ticks = 0.0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        media: Sequence[Media] = (),
    ) -> Completion:
        number = sampling.seed
        await self.clock.sleep(number)
        self.token_ticks += number * (len(prompt_ids) + number / 2)
        ids = np.zeros(number, np.int64)
        return Completion(ids, np.zeros(number, np.float32), "length", (VersionRun(0, number),))


class Chosen:
    """Routes each request where `choose` says; it is told the conversation and the numbers of requests in
    flight."""

    def __init__(self, replicas: Sequence[Replica], choose: Callable[[str, list[int]], int]) -> None:
        self.replicas, self.choose, self.num_requests = replicas, choose, [0] * len(replicas)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, request_id: str
    ) -> Completion:
        index = self.choose(request_id, self.num_requests)
        self.num_requests[index] += 1
        try:
            return await self.replicas[index].generate(prompt_ids, sampling, request_id)
        finally:
            self.num_requests[index] -= 1

    async def release(self, request_id: str) -> None:
        return None


def least_requests() -> Callable[[str, list[int]], int]:
    homes: dict[str, int] = {}
    return lambda name, counts: homes.setdefault(name, counts.index(min(counts)))


def routers(seed: int) -> dict[str, Callable[[Sequence[Replica]], object]]:
    rng = random.Random(seed)
    return {
        "manager": LLMServerManager,
        "least requests": lambda replicas: Chosen(replicas, least_requests()),
        "plain sticky": lambda replicas: Chosen(
            replicas, lambda name, counts: hash((seed, int(name))) % len(counts)
        ),
        "random": lambda replicas: Chosen(replicas, lambda name, counts: rng.randrange(len(counts))),
    }


async def simulate(
    make: Callable[[Sequence[Replica]], object], seed: int, num_conversations: int
) -> tuple[np.ndarray, int]:
    """Time-averaged tokens in flight of each replica, and how often the manager moved a conversation."""
    clock = Clock()
    replicas = [Replica(clock) for _ in range(NUM_REPLICAS)]
    server = make(replicas)
    rng = np.random.default_rng(seed)
    lengths = np.minimum(
        np.exp(rng.normal(np.log(MEDIAN_TOKENS), SIGMA, num_conversations)).astype(int) + 1, MAX_TOKENS
    )
    pauses = rng.exponential(20, size=num_conversations)
    waiting = iter(range(num_conversations))

    async def player() -> None:
        for number in waiting:
            context, left = PROMPT_TOKENS, int(lengths[number])
            while left:
                turn = min(left, MAX_TURN)
                # The seed carries the length of the response, which the router doesn't know: to it every turn
                # is a whole one.
                await server.generate(range(context), SamplingParams(MAX_TURN, seed=turn), str(number))
                context, left = context + turn, left - turn
                await clock.sleep(pauses[number])
            await server.release(str(number))

    await clock.run(asyncio.gather(*(player() for _ in range(AT_ONCE))))
    num_released = sum(len(replica.released) for replica in replicas)
    return np.array([replica.token_ticks for replica in replicas]) / clock.now, max(
        num_released - num_conversations, 0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "balance.json")
    options = parse_arguments(parser, seeds=1, conversations=16)
    results: dict[str, dict[str, float]] = {}
    for name in routers(0):
        if options.only and name != options.only:
            continue
        runs = [
            asyncio.run(simulate(routers(seed)[name], seed, options.conversations))
            for seed in range(options.seeds)
        ]
        loads, moves = zip(*runs, strict=True)
        off = [float(np.abs(load / load.mean() - 1).max()) for load in loads]
        results[name] = {"mean": round(float(np.mean(off)), 4), "worst": round(max(off), 4)}
        if name == "manager":
            results[name]["moves_per_conversation"] = round(float(np.mean(moves)) / options.conversations, 3)
        print(
            f"{name:15} largest deviation of a replica: {np.mean(off):6.1%} in the mean of seeds, "
            f"{max(off):6.1%} at worst"
        )
    result = {"machine": describe_machine(), "seeds": options.seeds, "deviation": results}
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
