"""Training on two ranks of one thread each against one rank of two threads, and how even the ranks' shares
are; rollouts from two inference servers in processes of one thread each against one server of two threads in
the process of the run.

    python benchmarks/ranks.py [--rounds N]

Both train the `tiny` preset with random weights on the same 128 samples of the quickstart's rollouts, an
optimiser step of cross entropy each. They run by turns, round after round; the ratio is the median of pairs.
Shares are of the ranks' time: passes, the sum of gradients (which includes waiting for the slower rank), the
optimiser, and the rest, in which a rank waits for orders. Servers play 64 episodes of FrozenLake with a tiny
random model; the share is that of their engines in the seconds that their processes had. On one CPU two of
anything share what one has, so that a ratio says what they cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from machine import describe_machine
from toy import parse_arguments
from train import LEARNING_RATE, load, make_model

from turnwise.assemble.placement import set_torch_threads
from turnwise.assemble.rollouts import build_scheduler, open_served_policy
from turnwise.batching.plan import deal
from turnwise.cluster.fork_server import prepare_processes
from turnwise.cluster.process_cluster import ProcessCluster
from turnwise.config import AgenticConfig, parse_config
from turnwise.config.place import place
from turnwise.examine.examined import examine
from turnwise.models.make import make_model as make_tiny_model
from turnwise.models.packed_attention import PACKED_ATTENTION
from turnwise.pipelines.model_role import BatchPlan, ModelRole
from turnwise.runtime.event_loop import WatchedRunner
from turnwise.runtime.machine import Machine, Node
from turnwise.runtime.placement import CpuThreads
from turnwise.runtime.rank import RankContext
from turnwise.runtime.stopwatch import ENGINE, Stopwatch
from turnwise.runtime.watchdog import Watchdog
from turnwise.training.cross_entropy import CrossEntropy
from turnwise.training.optimizer import OptimizerSettings
from turnwise.training.torch_strategy import TorchStrategy
from turnwise.types import Sample

THREADS = 2
EXAMPLE = Path(__file__).parent.parent / "examples" / "frozen_lake" / "agentic.yaml"
PLAN = BatchPlan(samples_per_step=128, max_length=512, seed=0, max_tokens_train=4096)


class Spans(Stopwatch):
    """Seconds by the names of spans."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()

    def add(self, track: str, name: str, started: float, ended: float | None = None, **details: Any) -> None:
        self.seconds[name] += (self.now() if ended is None else ended) - started


def strategy(vocab_size: int, rank: RankContext) -> TorchStrategy:
    model = make_model(vocab_size)
    model.set_attn_implementation(PACKED_ATTENTION)
    return TorchStrategy(model, optimizer=OptimizerSettings(LEARNING_RATE), rank=rank)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "ranks.json"))
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--batches", type=int, default=20, help="of random lengths, dealt to ranks")
    options = parse_arguments(parser, rounds=1, samples=8, episodes=8, batches=1)
    prepare_processes(["turnwise.assemble.strategies", "turnwise.assemble.servers"])
    samples = load()[: options.samples]
    tokens = sum(sample.num_tokens for sample in samples)
    rates: dict[int, list[float]] = {1: [], 2: []}
    with WatchedRunner(Watchdog()) as runner:
        vocab_size = max(int(sample.token_ids.max()) for sample in samples) + 1
        contenders = {size: Contender(runner, size, vocab_size) for size in rates}
        for number in range(options.rounds + 1):
            for size, contender in contenders.items():
                seconds = contender.step(samples, number)
                if number:
                    rates[size].append(tokens / seconds)
        shares = {size: contender.shares() for size, contender in contenders.items()}
        for contender in contenders.values():
            contender.cluster.shutdown()
    served, busy = replicas(options.rounds, options.episodes)
    result = {
        "tokens_per_s": {f"{size} ranks": round(statistics.median(values)) for size, values in rates.items()},
        "2 ranks / 1 rank": round(
            statistics.median(b / a for a, b in zip(rates[1], rates[2], strict=True)), 2
        ),
        "shares": {f"{size} ranks": share for size, share in shares.items()},
        "imbalance": imbalance(options.batches),
        "sampled_tokens_per_s": {
            f"{size} servers": round(statistics.median(values)) for size, values in served.items()
        },
        "2 servers / 1 server": round(
            statistics.median(b / a for a, b in zip(served[1], served[2], strict=True)), 2
        ),
        "engine_share": {f"{size} servers": share for size, share in busy.items()},
        "rounds": options.rounds,
        "machine": describe_machine() | {"threads": THREADS},
    }
    Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


class Contender:
    """So many ranks, which share the threads."""

    def __init__(self, runner: WatchedRunner, size: int, vocab_size: int) -> None:
        self.size, self.stopwatch, self.seconds = size, Spans(), 0.0
        values = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")) | {"cluster": {"name": "process"}}
        values["actor_train"] = values.get("actor_train", {}) | {"device_mapping": list(range(size))}
        placement = place(parse_config(values, AgenticConfig)[0], Machine((Node(size),)))
        threads = CpuThreads(THREADS, THREADS, torch.get_num_threads())
        self.cluster = ProcessCluster(
            runner.run, runner.watchdog, self.stopwatch, threads, set_torch_threads, placement=placement
        )
        workers = self.cluster.spawn("actor_train", partial(strategy, vocab_size))
        self.role = ModelRole("actor_train", workers, PLAN, self.stopwatch)

    def step(self, samples: list[Sample], number: int) -> float:
        """Seconds of an optimiser step."""
        started = time.perf_counter()
        self.role.optimizer_step(samples, CrossEntropy(), position=number)
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        return elapsed

    def shares(self) -> dict[str, float]:
        """Shares of the ranks' time."""
        own = {name: seconds / (self.size * self.seconds) for name, seconds in self.stopwatch.seconds.items()}
        known = {
            name: round(own[name], 3)
            for name in ("forward and backward", "sum over ranks", "optimizer")
            if name in own
        }
        return known | {"waiting": round(1 - sum(known.values()), 3)}


def replicas(rounds: int, num_episodes: int) -> tuple[dict[int, list[float]], dict[int, float]]:
    """Sampled tokens per second of each round, and the engines' share of time, by the number of servers."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    engines: dict[int, list[float]] = {1: [], 2: []}
    with TemporaryDirectory() as folder, ExitStack() as ends:
        make_tiny_model("tiny", Path(folder), [EXAMPLE.read_text(encoding="utf-8")])
        schedulers = {}
        for size in rates:
            values = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")) | {
                "pretrain": folder,
                "num_gpus_per_node": size,
            }
            values["actor_infer"] = values.get("actor_infer", {}) | {"device_mapping": list(range(size))}
            config = parse_config(values, AgenticConfig)[0]
            policy = open_served_policy(examine(config))
            ends.callback(policy.close)
            schedulers[size] = policy, build_scheduler(examine(config), policy, "train")
        for number in range(rounds + 1):
            for size, (policy, scheduler) in schedulers.items():
                watch = policy.event_loop.stopwatch
                before, started = (watch.num_sampled, engine_s(watch)), time.perf_counter()
                scheduler.get_batch(num_episodes)
                seconds = time.perf_counter() - started
                if number:
                    rates[size].append((watch.num_sampled - before[0]) / seconds)
                    engines[size].append((engine_s(watch) - before[1]) / seconds / size)
    return rates, {size: round(statistics.median(shares), 2) for size, shares in engines.items()}


def engine_s(stopwatch: Stopwatch) -> float:
    """Seconds of all engines."""
    return sum(seconds for track, seconds in stopwatch.totals.items() if track.endswith(ENGINE))


def imbalance(num_batches: int) -> dict[str, float]:
    """The fullest rank's tokens over the mean, less 1: the worst of the batches of 32 groups of 8. Lengths
    are log-normal."""
    worst = {}
    for num_ranks in (2, 4, 8):
        found = []
        for seed in range(num_batches):
            lengths = np.clip(np.random.default_rng(seed).lognormal(5, 1, 256), 8, 4096).astype(int)
            samples = [random_sample(index // 8, int(length)) for index, length in enumerate(lengths)]
            tokens = [sum(samples[index].num_tokens for index in rank) for rank in deal(samples, num_ranks)]
            found.append(max(tokens) * num_ranks / sum(tokens) - 1)
        worst[f"{num_ranks} ranks"] = round(max(found), 4)
    return worst


def random_sample(prompt: int, length: int) -> Sample:
    return Sample(
        np.array([prompt, *range(length - 1)]), np.arange(length) > 0, np.zeros(length, np.float32), ()
    )


if __name__ == "__main__":
    main()
