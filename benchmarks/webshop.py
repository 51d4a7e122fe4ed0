"""How long the shop takes: its catalogue and index, a step, and a search.

    python benchmarks/webshop.py [--sizes 1000 100000]

CPU seconds of one thread; steps and searches are means over many, the best of five rounds. Steps are those of
the random player, with a `reset` for each episode of at most ten. Each size runs in a process of its own,
whose memory is its peak less that of the imports.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from machine import describe_machine
from toy import parse_arguments

from turnwise.envs.webshop.env import WebShopEnv

HERE = Path(__file__).parent
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--episodes", type=int, default=200, help="episodes, and searches, of a round")
    parser.add_argument("--here", action="store_true", help="measure one size in this process")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "webshop.json")
    options = parse_arguments(parser, sizes=[100], episodes=4)
    if options.here:
        print(json.dumps(measure(options.sizes[0], options.episodes)))
        return
    rows = [in_a_process(size, options.episodes) for size in options.sizes]
    for row in rows:
        print(
            f"{row['num_products']:>9,} products: made in {row['made_s']:.2f} s, {row['memory_mb']:.0f} MB, "
            f"{row['step_ms']:.3f} ms a step, {row['search_ms']:.3f} ms a search",
            flush=True,
        )
    options.out.write_text(json.dumps({"machine": describe_machine(), "sizes": rows}, indent=1) + "\n")


def in_a_process(num_products: int, num_episodes: int) -> dict[str, float]:
    words = ["--here", "--sizes", str(num_products), "--episodes", str(num_episodes)]
    answer = subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True)
    row: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return row


def measure(num_products: int, num_episodes: int) -> dict[str, float]:
    WebShopEnv(num_products=51)  # imports everything
    before = peak_mb()
    started = time.process_time()
    env = WebShopEnv(num_products=num_products, observation="short")
    made_s = time.process_time() - started
    memory_mb = peak_mb() - before
    queries = []
    for seed in range(num_episodes):
        env.reset(seed=seed)
        queries.append(env.goal.words)

    def play() -> int:
        rng = random.Random(0)
        num_steps = 0
        for seed in range(num_episodes):
            env.reset(seed=seed)
            for _ in range(10):
                num_steps += 1
                if env.step(env.random_action(rng))[2]:
                    break
        return num_steps

    def search() -> int:
        for query in queries:
            env.shop.search(query)
        return len(queries)

    return {
        "num_products": num_products,
        "made_s": made_s,
        "memory_mb": memory_mb,
        "step_ms": 1e3 * best_mean(play),
        "search_ms": 1e3 * best_mean(search),
    }


def best_mean(play: Callable[[], int]) -> float:
    """CPU seconds of one item, in the best of the rounds. `play` returns how many it has done."""
    means = []
    for _ in range(ROUNDS):
        started = time.process_time()
        num_items = play()
        means.append((time.process_time() - started) / num_items)
    return min(means)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
