"""Our CPU time of a step in an environment behind an OpenEnv server, and episodes that wait for its places.

    python benchmarks/openenv_steps.py [--steps N] [--rounds N] [--server URL]

1. One episode at a time: CPU milliseconds of this process for a step over loopback, the best of the rounds.
The server is another process, `turnwise serve-env` for FrozenLake unless `--server` names one.
2. 64 episodes at once against 4 places: all are played.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import describe_machine
from toy import parse_arguments

from turnwise.envs.openenv.env import OpenEnvEnv

HERE = Path(__file__).parent
CONFIG = HERE.parent / "examples" / "frozen_lake" / "agentic.yaml"
NUM_PLACES, NUM_EPISODES = 4, 64
MOVES = ("Left", "Up")
"""In FrozenLake without slipping they lead to the wall, so that an episode lasts."""


@contextmanager
def served() -> Iterator[str]:
    """The address of a server with `NUM_PLACES` places."""
    command = [sys.executable, "-m", "turnwise.cli.main", "serve-env", str(CONFIG), "FrozenLake"]
    command += ["--port", "0", "--max-sessions", str(NUM_PLACES)]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert server.stdout is not None
        try:
            for line in server.stdout:
                place = line.find("http://")
                if place >= 0:
                    yield line[place:].split()[0]
                    return
            raise SystemExit(f"serve-env has ended with status {server.wait()}")
        finally:
            server.terminate()
            server.wait()


async def played(url: str, num_steps: int, seed: int) -> int:
    """Plays steps, beginning anew where an episode ends, and returns how many the server has taken."""
    env = OpenEnvEnv(url)
    await env.reset(seed=seed)
    num_taken = 0
    for number in range(num_steps):
        _, _, is_over, _, info = await env.step(MOVES[number % len(MOVES)])
        num_taken += int(info["metrics"]["action_is_valid"])
        if is_over:
            await env.reset(seed=seed)
    await env.close()
    return num_taken


async def cpu_ms_of_a_step(url: str, num_steps: int) -> float:
    """The connection and the starts of episodes are in it."""
    started = time.process_time()
    num_taken = await played(url, num_steps, seed=0)
    assert num_taken == num_steps, "the server has refused actions"
    return 1e3 * (time.process_time() - started) / num_steps


async def played_at_once(url: str) -> int:
    """How many of `NUM_EPISODES` episodes have had all their steps taken."""
    counts = await asyncio.gather(*(played(url, 3, seed) for seed in range(NUM_EPISODES)))
    return counts.count(3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "openenv_steps.json")
    options = parse_arguments(parser, steps=5, rounds=1)
    with served() as url:
        rounds = [asyncio.run(cpu_ms_of_a_step(url, options.steps)) for _ in range(options.rounds)]
        num_played = asyncio.run(played_at_once(url))
    result = {
        "machine": describe_machine(),
        "cpu_ms_a_step": round(min(rounds), 3),
        "episodes": NUM_EPISODES,
        "places": NUM_PLACES,
        "played": num_played,
    }
    print(json.dumps(result, indent=2))
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
