"""How late environments make the event loop: in worker processes, and in threads of this one.

    python benchmarks/env_workers.py [--environments N] [--waiting S ...] [--rounds N]

Each environment computes 1 ms of Python in a step and waits a while, and is stepped again as soon as it has
answered. Meanwhile a task on the same event loop sleeps for 5 ms again and again and notes how much later it
comes back: so much later the engine would make its next step. With 512 environments that wait for 1 s a core
is half busy; with 50 ms all cores are saturated. Calls go through the sessions of a run's agents, and results
through its checks. The modes are measured in turn, and medians of the rounds are quoted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from machine import describe_machine
from toy import parse_arguments

from turnwise.agents.env_session import CallSettings
from turnwise.cluster.env_pool import EnvPool, PoolSettings
from turnwise.envs.base import Step, TextEnv
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.types import Task

COMPUTING_S = 1e-3
BEAT_S = 5e-3
TASK = Task(id="train/Busy/0", tag="Busy", split="train", seed=1)


class BusyEnv(TextEnv):
    """Each step computes in Python, then waits."""

    metric_reductions: ClassVar[dict[str, Any]] = {}

    def __init__(self, waiting_s: float) -> None:
        self._waiting_s = waiting_s

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "busy", {}

    def step(self, action: str) -> Step:
        end = time.thread_time() + COMPUTING_S
        while time.thread_time() < end:
            pass
        time.sleep(self._waiting_s)
        return "busy", 0.0, False, False, {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=int, default=512)
    parser.add_argument("--waiting", type=float, nargs="+", default=[1.0, 0.05])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4 * (os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "env_workers.json")
    options = parse_arguments(parser, environments=4, waiting=[0.01], seconds=0.3, rounds=1, workers=1)
    results: dict[str, Any] = {}
    for waiting_s in options.waiting:
        rows: dict[str, list[dict[str, float]]] = {"workers": [], "threads": []}
        for _ in range(options.rounds):
            for mode, measured in rows.items():
                num_workers = options.workers if mode == "workers" else 0
                measured.append(lateness(options.environments, waiting_s, options.seconds, num_workers))
                print(f"waiting {waiting_s:g} s, {mode}", measured[-1], flush=True)
        results[f"waiting_{waiting_s:g}_s"] = {
            mode: {name: round(statistics.median(row[name] for row in measured), 2) for name in measured[0]}
            for mode, measured in rows.items()
        }
    result = {
        "by_waiting": results,
        "environments": options.environments,
        "workers": options.workers,
        "rounds": options.rounds,
        "load_average": round(os.getloadavg()[1], 1),
        "machine": describe_machine(),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["by_waiting"], indent=2))


def lateness(num_environments: int, waiting_s: float, seconds: float, num_workers: int) -> dict[str, float]:
    """Milliseconds by which the event loop is late, and steps of environments a second. Without workers
    environments are in threads."""
    make_env: Any = partial(BusyEnv, waiting_s)
    with WatchedRunner() as runner:
        if num_workers:
            settings = PoolSettings("Busy", "BusyEnv", watchdog=runner.watchdog)
            pool = EnvPool(make_env, num_workers, settings, runner.loop)
            runner.at_close(pool.end)
            runner.watchdog.start()
            pool.begin()
            calls = CallSettings(are_remote=True, watchdog=runner.watchdog)
            return runner.run(_measured(calls, pool.make, num_environments, seconds))
        calls = CallSettings(max_in_threads=num_environments, watchdog=runner.watchdog)
        return runner.run(_measured(calls, lambda task: make_env(), num_environments, seconds))


async def _measured(
    calls: CallSettings, make_env: Any, num_environments: int, seconds: float
) -> dict[str, float]:
    open_session = calls.opener("Busy")
    sessions = [open_session() for _ in range(num_environments)]
    num_steps = 0
    is_over = False

    async def begin(session: Any) -> None:
        await session.make(make_env, TASK)
        await session.reset(seed=1)

    async def play(session: Any) -> None:
        nonlocal num_steps
        turn = 0
        while not is_over:
            turn += 1
            await session.step("go", turn)
            num_steps += 1
        await session.close()
        session.end()

    await asyncio.gather(*map(begin, sessions))
    playing = [asyncio.ensure_future(play(session)) for session in sessions]
    await asyncio.sleep(seconds / 5)  # until the environments are spread over their waits
    num_before = num_steps
    late_ms = []
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        slept = time.perf_counter()
        await asyncio.sleep(BEAT_S)
        late_ms.append(1e3 * (time.perf_counter() - slept - BEAT_S))
    elapsed_s = time.perf_counter() - started
    num_played = num_steps - num_before
    is_over = True
    await asyncio.gather(*playing)
    late_ms.sort()
    return {
        "late_p50_ms": round(statistics.median(late_ms), 2),
        "late_p99_ms": round(late_ms[int(0.99 * len(late_ms))], 2),
        "steps_per_s": round(num_played / elapsed_s, 1),
    }


if __name__ == "__main__":
    main()
