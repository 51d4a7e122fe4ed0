"""Whether the embedded server leaks: conversations come, are cancelled and go, weights are updated, and
memory stays flat.

    python benchmarks/soak.py [--minutes 10]

64 conversations at a time over a tiny model: contexts that share prompts, one turn in ten cancelled at a
random moment, some left without being released, a weight update every two hundred conversations. Prints the
memory of the process as it goes, and fails where the second half of the time needs more than the first did,
or anything is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

import numpy as np
from toy import parse_arguments
from transformers import AutoConfig, AutoModelForCausalLM

from turnwise.inference.embedded.server import EmbeddedServer
from turnwise.models.presets import preset
from turnwise.types import SamplingParams

NUM_AT_ONCE = 64
VOCAB = 512
SLACK = 1.02
"""Growth that is noise: the allocator's, not ours."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--slack", type=float, default=SLACK, help="growth that doesn't count")
    options = parse_arguments(parser, minutes=0.03, slack=100.0)
    samples = asyncio.run(soak(60 * options.minutes))
    half = len(samples) // 2
    # What grows by doubling has its size after a tenth of the time.
    first, last = max(samples[len(samples) // 10 : half]), max(samples[half:])
    print(f"first half {first:.1f} MiB, second half {last:.1f} MiB")
    if last > options.slack * first:
        sys.exit(f"memory has grown by {last / first - 1:.1%}")


async def soak(seconds: float) -> list[float]:
    """Memory in MiB, twenty times or more."""
    shape = preset("tiny")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(shape.model_type, **shape.config, vocab_size=VOCAB)
    ).eval()
    server = EmbeddedServer(model, max_length=512, max_concurrency=48, kv_cache_bytes=2**27)
    samples: list[float] = []
    started = reported = time.monotonic()
    running: set[asyncio.Task[None]] = set()
    number = 0
    while time.monotonic() - started < seconds:
        while len(running) < NUM_AT_ONCE:
            running.add(asyncio.create_task(converse(server, number)))
            number += 1
            if number % 200 == 0:
                await server.suspend("abort")
                await server.resume(server.version + 1)
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if time.monotonic() - reported > seconds / 40:
            reported = time.monotonic()
            samples.append(memory_mib())
            print(
                f"{reported - started:7.1f} s  {number:7d} conversations  {samples[-1]:8.1f} MiB", flush=True
            )
    await asyncio.gather(*running)
    assert server._engine.num_running == 0 and not server._futures
    await server.close()
    return samples


async def converse(server: EmbeddedServer, number: int) -> None:
    rng = np.random.default_rng(number)
    context = np.random.default_rng(number % 20).integers(0, VOCAB, 80).tolist()
    for turn in range(int(rng.integers(1, 8))):
        task = asyncio.create_task(
            server.generate(context, SamplingParams(int(rng.integers(1, 16)), seed=turn), str(number))
        )
        if rng.random() < 0.1:
            for _ in range(int(rng.integers(1, 40))):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            break
        context += [*task.result().token_ids.tolist(), *rng.integers(0, VOCAB, 12).tolist()]
    if rng.random() < 0.9:
        await server.release(str(number))


def memory_mib() -> float:
    """What the process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
