"""What an episode costs beside its environment and its server, from a hundred concurrent episodes to ten
thousand.

    python benchmarks/scale.py [--rounds N]

The scheduler, agent loop, conversations, server manager, watchdog and stopwatch of a run play groups of 10
episodes of 8 turns, all at once, with a server that answers with given tokens and an environment that shows a
lake of FrozenLake's size: 156 tokens a turn with a byte tokenizer. The time is the process's CPU time, since
the machine is shared; what server and environment take themselves is measured apart and taken off. Each size
runs in a process of its own, in turn, and medians are quoted.

Texts come back, as those of siblings do, and their ids are kept: `new_text_us` is what a text costs that
nobody has met before. Memory is by tracemalloc: the most that was alive at once, for each episode, and the
finished trajectories alone, which training needs anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from crowd_server import CrowdServer
from machine import describe_machine
from toy import parse_arguments

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.env_session import CallSettings
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.envs.base import Step, TextEnv
from turnwise.inference.server_manager import LLMServerManager
from turnwise.rollout.scheduler import RolloutScheduler
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.tasks import SeededTasks
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.watchdog import Watchdog
from turnwise.testing.fakes import byte_tokenizer
from turnwise.types import Group, Reduction, SamplingParams

SIZES = (100, 1_000, 10_000)
GROUP_SIZE = 10
NUM_TURNS = 8
TURN = "\nYou have 5 actions left. Give your next action as <answer>action</answer>, in at most 32 tokens."
LONGEST_S = 3600.0
"""Deadlines are on, as in a run, and none is met."""


class LakeEnv(TextEnv):
    """Shows one of a lake's 16 places at each turn; every answer is a step."""

    actions = ("Left", "Down", "Right", "Up")
    metric_reductions: ClassVar[Mapping[str, Reduction]] = {"success": "last"}

    def __init__(self) -> None:
        self._place = self._num_steps = 0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._place = (seed or 0) % 16
        return LAKES[self._place], {}

    def step(self, action: str) -> Step:
        self._num_steps += 1
        self._place = (self._place + 1) % 16
        return LAKES[self._place], 0.125, self._num_steps == NUM_TURNS, False, {"metrics": {"success": 1.0}}


def _lake(place: int) -> str:
    cells = ["P" if cell == place else "_" for cell in range(16)]
    return "\n".join(" ".join(cells[row : row + 4]) for row in range(0, 16, 4))


LAKES = tuple(_lake(place) for place in range(16))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scale.json")
    parser.add_argument("--one", type=int, help="measure this many episodes here, and print the JSON")
    parser.add_argument("--memory", action="store_true", help="trace allocations instead of timing")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="episodes at once")
    options = parse_arguments(parser, rounds=1, sizes=[10])
    if options.one:
        print(json.dumps(memory(options.one) if options.memory else cost(options.one)))
        return
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in options.sizes}
    for _ in range(options.rounds):
        for size in options.sizes:
            runs[size].append(measured(size))
            print(size, runs[size][-1], flush=True)
    sizes = {
        size: {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}
        | measured(size, "--memory")
        for size, rows in runs.items()
    }
    smallest = sizes[options.sizes[0]]
    result = {
        "by_concurrent_episodes": sizes,
        f"over_that_at_{options.sizes[0]}": {
            name: {size: round(row[name] / smallest[name], 2) for size, row in sizes.items()}
            for name in ("overhead_us", "peak_kib_an_episode")
        },
        "rounds": options.rounds,
        "group_size": GROUP_SIZE,
        "num_turns": NUM_TURNS,
        "machine": describe_machine(),
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def measured(size: int, *flags: str) -> dict[str, float]:
    """One size in a process of its own."""
    command = [sys.executable, __file__, "--one", str(size), *flags]
    row: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return row


def cost(size: int) -> dict[str, float]:
    """CPU microseconds of a turn with `size` episodes at once."""
    crowd = Crowd(size)
    crowd.warm_up()
    num_batches = max(1, 2_000 // size)
    with_all = time.process_time()
    for _ in range(num_batches):
        crowd.play()
    num_turns = num_batches * size * NUM_TURNS
    total_us = (time.process_time() - with_all) / num_turns * 1e6
    alone_us = min(crowd.fakes_alone() for _ in range(3)) / (size * NUM_TURNS) * 1e6
    new_text_us = crowd.new_text()
    crowd.close()
    return {
        "turn_us": round(total_us, 2),
        "fakes_us": round(alone_us, 2),
        "overhead_us": round(total_us - alone_us, 2),
        "new_text_us": round(new_text_us, 2),
    }


def memory(size: int) -> dict[str, float]:
    """KiB of Python objects an episode: the most that were alive at once, and those of the finished
    trajectories."""
    crowd = Crowd(size)
    crowd.warm_up()
    gc.collect()
    tracemalloc.start()
    groups = crowd.play()
    finished, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(groups) == size // GROUP_SIZE
    crowd.close()
    return {
        "peak_kib_an_episode": round(peak / 1024 / size, 2),
        "trajectory_kib": round(finished / 1024 / size, 2),
    }


class Crowd:
    """A scheduler whose batches are `size` episodes, all at once, and all that stands behind it in a run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.template = ChatTemplate(byte_tokenizer())
        self.answer = self.template.respond("<answer>Right</answer>")
        self.watchdog = Watchdog()
        self.event_loop = WatchedRunner(self.watchdog, LONGEST_S)
        self.server = CrowdServer(lambda _: self.answer)
        calls = CallSettings(timeout_s=LONGEST_S, watchdog=self.watchdog)
        settings = EnvAgentSettings("Lake", max_tokens_per_step=32, episode_timeout_s=LONGEST_S, calls=calls)
        servers = LLMServerManager([self.server], request_s=LONGEST_S, watchdog=self.watchdog)
        agent = EnvAgent(lambda _: LakeEnv(), settings)
        self.scheduler = RolloutScheduler(
            run_async=self.event_loop.run,
            tasks=SeededTasks(0, "train", ("Lake",), (1,)),
            agents=lambda task: agent,
            contexts=partial(TokenContexts, self.template, servers, 4096),
            sampling=SamplingParams(max_new_tokens=32),
            settings=SchedulerSettings(
                GROUP_SIZE, max_concurrent_groups=size // GROUP_SIZE, episode_timeout_s=LONGEST_S
            ),
            watchdog=self.watchdog,
        )

    def warm_up(self) -> None:
        """One group: what is compiled and cached at the first turn costs nothing later."""
        self.scheduler.get_batch(GROUP_SIZE)

    def play(self) -> Sequence[Group]:
        groups = self.scheduler.get_batch(self.size)
        assert self.server.largest_crowd == self.size
        return groups

    def fakes_alone(self) -> float:
        """CPU seconds of server and environment for as many episodes without anything between them."""
        prompt, sampling = [1], SamplingParams(max_new_tokens=32, stop_token_ids=self.template.stop_token_ids)

        async def episode(number: int) -> None:
            env = LakeEnv()
            env.reset(seed=number)
            for _ in range(NUM_TURNS):
                await self.server.generate(prompt, sampling, "")
                env.step("Right")

        async def everybody() -> None:
            await asyncio.gather(*(episode(number) for number in range(self.size)))

        started = time.process_time()
        self.event_loop.run(everybody())
        return time.process_time() - started

    def new_text(self, num_texts: int = 1_000) -> float:
        """CPU microseconds to render and encode a message that is new."""

        async def encode() -> None:
            for number in range(num_texts):
                self.template.extend(
                    self.answer, [{"role": "user", "content": f"Turn {number}:\n{LAKES[number % 16]}{TURN}"}]
                )

        started = time.process_time()
        self.event_loop.run(encode())
        return (time.process_time() - started) / num_texts * 1e6

    def close(self) -> None:
        self.event_loop.close()


if __name__ == "__main__":
    main()
