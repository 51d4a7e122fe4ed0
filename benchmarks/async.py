"""Asynchronous against synchronous training with a slow environment: time of a step, its distance to the
bound, and what is learned.

    python benchmarks/async.py MODEL                         # about an hour on two cores
    python benchmarks/async.py MODEL --steps 40 --seeds      # times only

`MODEL` is the checkpoint that `examples/frozen_lake/agentic.yaml` starts from. Batch and trainer load are
those of that example and the latencies those of `slow_lake.py`, whatever is measured. The bound is the slower
of the two sides, each alone and at its share of the cores: rollouts that nobody trains on, as far ahead as
the run that is measured, and training on the rollouts of a file. Rollouts a batch at a time, as a synchronous
run plays them, are measured as well. Synchronous runs use all cores for either side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from machine import describe_machine
from slow_lake import SlowLake
from toy import parse_arguments

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.config import AgenticConfig, parse_config
from turnwise.examine.examined import examine
from turnwise.pipelines.agentic import AgenticPipeline
from turnwise.tracking.jsonl import read_metrics

EXAMPLE = Path(__file__).parent.parent / "examples" / "frozen_lake" / "agentic.yaml"
NUM_WARM_UP = 3
"""Steps before the first that counts."""


@dataclass(frozen=True)
class Bench:
    """What all runs share."""

    model: str
    folder: Path
    num_steps: int
    batch: int
    num_cores: int
    max_turns: int = 10

    @property
    def share(self) -> int:
        """Cores of the trainer."""
        return self.num_cores - self.num_cores // 2

    def config(self, ratio: int, seed: int, **changes: Any) -> AgenticConfig:
        values = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
        values["custom_envs"]["FrozenLake"] |= {"env_type": "slow_lake:SlowLake", "max_steps": self.max_turns}
        # Enough for the farthest that any run may be ahead; a synchronous one never has more than a batch.
        values["train_env_manager"]["num_env_groups"] = (
            3 * self.batch // values["train_env_manager"]["group_size"]
        )
        values |= {
            "exp_name": f"ratio-{ratio}-seed-{seed}",
            "output_dir": str(self.folder),
            "pretrain": self.model,
            "seed": seed,
            "max_steps": self.num_steps,
            "eval_steps": 0,
            "track_with": [],
            "rollout_batch_size": self.batch,
            "async_generation_ratio": ratio,
        }
        if ratio:
            values["train_infer_correction"] = {"is_weight": {"weight_type": "token", "upper_bound": 2.0}}
            values["cpu_split"] = {"train": self.share, "rollout": max(1, self.num_cores - self.share)}
        return parse_config(values | changes, AgenticConfig)[0]

    @contextmanager
    def pipeline(self, config: AgenticConfig, rollouts: Path | None = None) -> Iterator[AgenticPipeline]:
        SlowLake.forget()
        pipeline = build_agentic(examine(config), start_run(config), is_quiet=True, rollouts=rollouts)
        try:
            yield pipeline
        finally:
            pipeline.close()

    def train(self, ratio: int, seed: int, **changes: Any) -> dict[str, Any]:
        """A whole run: seconds a step, where they went, staleness, and success at the end."""
        with self.pipeline(self.config(ratio, seed, **changes)) as pipeline:
            pipeline.run()
        rows = read_metrics(pipeline.folder.metrics)
        steps = [row for row in rows if "actor/staleness_max" in row]
        result = {
            "step_s": mean(steps, "time/step_wall"),
            "waited_for_rollouts_s": mean(steps, "time/step_rollout"),
            "staleness_mean": mean(steps, "actor/staleness_mean"),
            "staleness_max": max(row["actor/staleness_max"] for row in steps),
            "rollouts": str(pipeline.folder.rollouts),
        }
        success = [row["val/env/FrozenLake/success"] for row in rows if "val/env/FrozenLake/success" in row]
        return result | ({"success": success[-1]} if success else {})

    def rollouts_alone(self, ratio: int, seed: int) -> tuple[float, list[float]]:
        """Seconds a batch that is played as far ahead as with this ratio, at the rollouts' share of the
        cores; and how long the slowest episode took of each batch of groups that started together."""
        torch.set_num_threads(max(1, self.num_cores - self.share))
        slowest: dict[int, float] = {}
        with self.pipeline(self.config(ratio, seed, max_steps=10_000)) as pipeline:
            source = pipeline.train_rollout_scheduler
            num_groups = self.batch // source.group_size
            pipeline.model_update(0)
            times = []
            for _ in range(self.num_steps):
                started = time.perf_counter()
                groups = source.get_batch(self.batch)
                times.append(time.perf_counter() - started)
                for group in groups:
                    took = max(
                        sum(turn.generate_s + turn.step_s for turn in t.turns) for t in group.trajectories
                    )
                    began = group.index // num_groups
                    slowest[began] = max(took, slowest.get(began, 0.0))
        torch.set_num_threads(self.num_cores)
        return statistics.fmean(times[NUM_WARM_UP:]), [slowest[began] for began in range(self.num_steps)]

    def trainer_alone(self, rollouts: Path, seed: int) -> list[float]:
        """Seconds of each step that has its rollouts already, at the trainer's share of the cores."""
        torch.set_num_threads(self.share)
        correction = {"is_weight": {"weight_type": "token", "upper_bound": 2.0}}
        with self.pipeline(self.config(0, seed, train_infer_correction=correction), rollouts) as pipeline:
            pipeline.run()
        torch.set_num_threads(self.num_cores)
        steps = [row for row in read_metrics(pipeline.folder.metrics) if "time/step_train" in row]
        return [row["time/step_wall"] - row["time/step_rollout"] for row in steps]


def pipelined(ratio: int, training: list[float], slowest: list[float]) -> float:
    """Seconds a step where both sides overlap ideally: none of them ends before the one before it has and its
    own training is done, nor before its slowest episode, which began `ratio` steps before with the weights of
    then."""
    ends = [0.0] * (ratio + 1)
    for trained_s, played_s in zip(training, slowest, strict=True):
        ends.append(max(ends[-1] + trained_s, ends[-ratio - 1] + played_s))
    first, last = ends[ratio + NUM_WARM_UP], ends[-1]
    return (last - first) / (len(training) - NUM_WARM_UP)


def mean(steps: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row.get(name, 0.0) for row in steps[NUM_WARM_UP:])


def measure(bench: Bench, ratios: list[int], num_pairs: int) -> dict[str, Any]:
    """Times of a step, and distances to the bound. What is compared runs in turn, since the machine's speed
    drifts: a synchronous run, one ahead, its trainer alone, its rollouts alone (a batch at a time, and as far
    ahead), the one ahead again, and one ahead that trains on whole batches (`stream_training: false`).

    The bound is the slower of the two sides' means. Batches differ, so at each step now one side is the
    slower, now the other: `pipelined_s` is what both would take together if they overlapped ideally under the
    bound of staleness, step by step.
    """
    result = {}
    for ratio in ratios:
        pairs = []
        for seed in range(num_pairs):
            synchronous, first = bench.train(0, seed), bench.train(ratio, seed)
            training, (rollouts_s, slowest) = (
                bench.trainer_alone(Path(first["rollouts"]), seed),
                bench.rollouts_alone(ratio, seed),
            )
            trainer_s = statistics.fmean(training[NUM_WARM_UP:])
            batchwise_s, _ = bench.rollouts_alone(0, seed)
            second = bench.train(ratio, seed)
            whole = bench.train(ratio, seed, stream_training=False)
            ahead = {name: (first[name] + second[name]) / 2 for name in first if name != "rollouts"}
            bound_s = max(trainer_s, rollouts_s)
            ideal_s = pipelined(ratio, training, slowest)
            pair = {
                "sync_step_s": synchronous["step_s"],
                "async_step_s": ahead["step_s"],
                "faster": synchronous["step_s"] / ahead["step_s"],
                "trainer_alone_s": trainer_s,
                "rollouts_alone_s": rollouts_s,
                "rollouts_batch_at_a_time_s": batchwise_s,
                "pipelined_s": ideal_s,
                "distance_to_bound": ahead["step_s"] / bound_s - 1,
                "distance_to_pipelined": ahead["step_s"] / ideal_s - 1,
                "distance_to_bound_batch_at_a_time": ahead["step_s"] / max(trainer_s, batchwise_s) - 1,
                "staleness_mean": ahead["staleness_mean"],
                "waited_for_rollouts_s": ahead["waited_for_rollouts_s"],
                "whole_batches_step_s": whole["step_s"],
                "whole_batches_faster": synchronous["step_s"] / whole["step_s"],
                "whole_batches_distance_to_bound": whole["step_s"] / bound_s - 1,
                "whole_batches_waited_for_rollouts_s": whole["waited_for_rollouts_s"],
            }
            pairs.append(pair)
            print(
                f"ratio {ratio}, pair {seed}: { {name: round(value, 3) for name, value in pair.items()} }",
                flush=True,
            )
        medians = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
        result[f"ratio_{ratio}"] = medians | {"pairs": pairs}
    return result


def learn(bench: Bench, ratios: list[int], seeds: list[int]) -> dict[str, list[float]]:
    """Held-out success at the end of whole runs."""
    success: dict[str, list[float]] = {f"ratio_{ratio}": [] for ratio in (0, *ratios)}
    for seed in seeds:
        for ratio in (0, *ratios):
            success[f"ratio_{ratio}"].append(bench.train(ratio, seed, eval_steps=bench.num_steps)["success"])
            print(f"seed {seed}, ratio {ratio}: success {success[f'ratio_{ratio}'][-1]:.3f}", flush=True)
    return success


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=20, help="of a run whose time is measured, more than 3")
    parser.add_argument(
        "--pairs", type=int, default=3, help="of runs whose time is measured; none, and only success is"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="*",
        default=[0, 1, 2],
        help="of whole runs; none, and only times are measured",
    )
    parser.add_argument("--learning-steps", type=int, default=80, help="of a whole run, more than 3")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--turns", type=int, default=10, help="of an episode, at most")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "async.json")
    toy = {"ratios": [1], "steps": 4, "pairs": 1, "seeds": [0], "learning_steps": 4, "batch": 8, "turns": 1}
    options = parse_arguments(parser, **toy)
    num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_cores)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.model, Path(folder), options.steps, options.batch, num_cores, options.turns)
        # What isn't measured this time stays as it was.
        result: dict[str, Any] = (
            json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
        )
        setting = {"machine": describe_machine(), "batch": options.batch}
        if options.pairs:
            result["times"] = (
                setting | {"steps": options.steps} | measure(bench, options.ratios, options.pairs)
            )
        if options.seeds:
            whole = replace(bench, num_steps=options.learning_steps)
            result["success"] = (
                setting | {"steps": options.learning_steps} | learn(whole, options.ratios, options.seeds)
            )
            print(f"success {result['success']}")
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
