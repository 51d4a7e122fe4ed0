"""What it costs to exchange environments and rollouts with OpenEnv: `python benchmarks/exchange.py`.

1. CPU time of our side of an OpenEnv call over loopback: FrozenLake, served by `turnwise serve-env` in a
process of its own. Best of five.
2. 64 episodes at once against a server of 4 places: all are played.
3. `rollouts.jsonl` → TrainingTrace → `rollouts.jsonl`: equal, and how many turns of 200 sampled ids it takes
in a second of CPU time, each way.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from machine import describe_machine
from toy import parse_arguments

from turnwise.envs.openenv.env import OpenEnvEnv
from turnwise.rollout.foreign_trace import checked_trace
from turnwise.rollout.journal import write_group
from turnwise.rollout.training_trace import own_lines, written_traces
from turnwise.types import Group, Task, Trajectory, Turn, VersionRun

NUM_EPISODES, NUM_PLACES, STEPS = 64, 4, 20
NUM_TURNS, GROUP_SIZE, NUM_ADDED, NUM_SAMPLED = 4, 4, 50, 200
COMMAND = "import sys; from turnwise.cli.main import main; sys.exit(main())"


@contextmanager
def served(folder: Path, num_places: int) -> Iterator[str]:
    """A process that serves FrozenLake at the yielded URL."""
    config = folder / "lake.yaml"
    config.write_text("custom_envs: {Lake: {env_type: frozen_lake}}\n")
    words = ["serve-env", str(config), "Lake", "--port", "0", "--max-sessions", str(num_places)]
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, "the server hasn't started"
        yield next(word for word in line.split() if word.startswith("http://"))
    finally:
        process.kill()
        process.wait()


async def play(url: str, seed: int) -> int:
    """Plays an episode, and returns its number of calls."""
    env = OpenEnvEnv(url)
    await env.wait_for_place()
    await env.reset(seed=seed)
    num_calls = 1
    for _ in range(STEPS):
        result = await env.step("Up")
        num_calls += 1
        if result[2]:
            break
    await env.close()
    return num_calls


async def step_us(url: str, num_episodes: int) -> float:
    """CPU microseconds of a call, connecting included."""
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        num_calls = sum([await play(url, seed) for seed in range(num_episodes)])
        best = min(best, 1e6 * (time.process_time() - started) / num_calls)
    return best


async def crowd(url: str) -> int:
    played = await asyncio.gather(*(play(url, seed) for seed in range(NUM_EPISODES)))
    return len(played)


def rollouts(num_groups: int) -> list[bytes]:
    """Lines of a rollouts.jsonl."""
    rng = np.random.default_rng(0)

    def turn(number: int) -> Turn:
        return Turn(
            rng.integers(0, 150_000, size=NUM_ADDED),
            rng.integers(0, 150_000, size=NUM_SAMPLED),
            -rng.random(NUM_SAMPLED).astype(np.float32),
            (VersionRun(1, NUM_SAMPLED),),
            text="x" * 2 * NUM_SAMPLED,
            starts_context=number == 0,
        )

    lines: list[bytes] = []
    for index in range(num_groups):
        task = Task(f"train/data/{index}", "data", "train", 0)
        siblings = [Trajectory(task, k, [turn(n) for n in range(NUM_TURNS)]) for k in range(GROUP_SIZE)]
        lines += [line.encode() for line in write_group(0, Group(task, siblings, index))]
    return lines


def turns_a_second(lines: list[bytes]) -> tuple[float, float]:
    """Turns a second of CPU time, out and in. What comes back must be the same."""
    num_turns = len(lines) * NUM_TURNS
    started = time.process_time()
    traces = list(written_traces((f"line {number}", line) for number, line in enumerate(lines)))
    out_s = time.process_time() - started
    started = time.process_time()
    back: list[bytes] = []
    for trace in traces:
        back += own_lines(checked_trace(trace, "a line"), "a line") or []
    in_s = time.process_time() - started
    assert back == lines, "what came back differs"
    return num_turns / out_s, num_turns / in_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--groups", type=int, default=100)
    options = parse_arguments(parser, episodes=2, groups=2)
    with tempfile.TemporaryDirectory() as name, served(Path(name), NUM_PLACES) as url:
        call_us = asyncio.run(step_us(url, options.episodes))
        num_played = asyncio.run(crowd(url))
    lines = rollouts(options.groups)
    rates = [turns_a_second(lines) for _ in range(5)]
    print(describe_machine())
    print(f"an OpenEnv call    {call_us:.0f} µs of CPU on our side, connecting included; best of five")
    print(f"crowd              {num_played} of {NUM_EPISODES} episodes played over {NUM_PLACES} places")
    print(f"to TrainingTrace   {max(rate[0] for rate in rates):,.0f} turns of {NUM_SAMPLED} ids a second")
    print(f"and back           {max(rate[1] for rate in rates):,.0f} turns a second, the same lines")


if __name__ == "__main__":
    main()
