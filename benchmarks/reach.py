"""How far one controller reaches: its own CPU time in runs of up to 256 replicas and 100,000 conversations.

    python benchmarks/reach.py [--sizes REPLICAS …] [--conversations N]

The scheduler, buffer, agent loop, conversations and router of a run are the real ones. Inference engines and
the trainer are simulated, in virtual time: an engine's step takes longer the more requests run, a training
takes the time of its tokens, and nothing waits in reality. So the process's CPU time is the controller's and
that of the simulated engines, which they measure themselves and which is taken off.

For each number of replicas: CPU microseconds of the controller for a turn; the turns a second of the run and
the share of one core that they take (`controller_load`: above 1 the controller is what is waited for); the
load of the busiest replica over the mean (`imbalance`); the share of their best rate at which engines decode
(`utilisation`), and what it would be if the trainer's rate alone bounded it (`bound`); the age of the trained
samples in versions (`staleness`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from machine import describe_machine
from scale import LakeEnv
from simulated_engine import EngineTimes, SimulatedEngine
from toy import parse_arguments
from virtual_time import VirtualTimeLoop

from turnwise.agents.env_agent import EnvAgent, EnvAgentSettings
from turnwise.agents.env_session import CallSettings
from turnwise.chat.contexts import TokenContexts
from turnwise.chat.template import ChatTemplate
from turnwise.inference.server_manager import LLMServerManager
from turnwise.rollout.scheduler import RolloutScheduler
from turnwise.rollout.settings import SchedulerSettings
from turnwise.rollout.tasks import SeededTasks
from turnwise.testing.fakes import byte_tokenizer
from turnwise.types import Group, SamplingParams, Turn

SIZES = (2, 16, 64, 256)
CONVERSATIONS = 400
"""Conversations a replica, so that 256 replicas have some 100,000."""
GROUP_SIZE = 8
RATIO = 1
NUM_BATCHES = 4
TRAINED_TOKENS_S = 6_000.0
"""Tokens a second that the trainer takes for each replica."""
TIMES = EngineTimes()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of replicas")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="at once, for each replica")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "reach.json")
    parser.add_argument("--one", type=int, help="simulate this many replicas here, and print the JSON")
    options = parse_arguments(parser, sizes=[2], conversations=16)
    if options.one:
        print(json.dumps(simulate(options.one, options.conversations)))
        return
    rows: dict[int, dict[str, float]] = {}
    for size in options.sizes:
        command = [
            sys.executable,
            __file__,
            "--one",
            str(size),
            "--conversations",
            str(options.conversations),
        ]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        rows[size] = json.loads(run.stdout)
        print(size, rows[size], flush=True)
    result = {
        "by_replicas": rows,
        "conversations_a_replica": options.conversations,
        "engine": {name: getattr(TIMES, name) for name in TIMES.__slots__},
        "machine": describe_machine(),
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def simulate(
    num_replicas: int, conversations: int, times: EngineTimes = TIMES, training_s: Sequence[float] = ()
) -> dict[str, float]:
    """A run of `NUM_BATCHES` batches, each of a quarter of the conversations that play at once. `training_s`
    are the seconds that follow each batch instead, one for each batch."""
    loop = VirtualTimeLoop()
    template = ChatTemplate(byte_tokenizer())
    answer = template.respond("<answer>Right</answer>")
    engines: list[Any] = [SimulatedEngine(answer, times) for _ in range(num_replicas)]
    num_groups = num_replicas * conversations // GROUP_SIZE
    settings = EnvAgentSettings("Lake", max_tokens_per_step=64, calls=CallSettings(timeout_s=None))
    agent = EnvAgent(lambda _: LakeEnv(), settings)
    scheduler = RolloutScheduler(
        run_async=loop.run_until_complete,
        tasks=SeededTasks(0, "train", ("Lake",), (1,)),
        agents=lambda task: agent,
        contexts=partial(TokenContexts, template, LLMServerManager(engines), 4096),
        sampling=SamplingParams(max_new_tokens=64),
        settings=SchedulerSettings(GROUP_SIZE, num_groups, async_generation_ratio=RATIO),
    )
    batch_size = max(1, num_groups // 4) * GROUP_SIZE
    groups: list[Group] = []
    ages: list[float] = []
    started = time.process_time()
    for version in range(len(training_s) or NUM_BATCHES):
        for engine in engines:
            engine.version = version
        batch = scheduler.get_batch(batch_size)
        ages += [version - run.version for turn in turns_of(batch) for run in turn.versions]
        num_tokens = len(turns_of(batch)) * times.mean_tokens
        groups += batch
        trained_s = training_s[version] if training_s else num_tokens / (TRAINED_TOKENS_S * num_replicas)
        loop.run_until_complete(asyncio.sleep(trained_s))
    cpu_s = time.process_time() - started
    virtual_s = loop.time()
    num_turns = sum(engine.num_requests for engine in engines)
    controller_us = (cpu_s - sum(engine.cpu_s for engine in engines)) / num_turns * 1e6
    scheduler.close()
    loop.close()
    tokens = [engine.num_tokens for engine in engines]
    turns_a_second = num_turns / virtual_s
    return {
        "conversations": num_groups * GROUP_SIZE,
        "controller_us_a_turn": round(controller_us, 1),
        "turns_a_second": round(turns_a_second, 1),
        "controller_load": round(turns_a_second * controller_us / 1e6, 3),
        "imbalance": round(max(tokens) / statistics.mean(tokens), 3),
        "utilisation": round(statistics.mean(tokens) / (virtual_s * times.tokens_a_second), 3),
        "bound": round(min(1.0, TRAINED_TOKENS_S / times.tokens_a_second), 3),
        "busy": round(statistics.mean(engine.busy_s for engine in engines) / virtual_s, 3),
        "staleness_mean": round(statistics.mean(ages), 3),
        "staleness_max": max(ages),
    }


def turns_of(groups: Sequence[Group]) -> list[Turn]:
    return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


if __name__ == "__main__":
    main()
