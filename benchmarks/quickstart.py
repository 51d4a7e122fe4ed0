"""Success on held-out maps from one fixed SFT checkpoint, over several seeds.

    python benchmarks/quickstart.py [KEY=VALUE ...] --sft-model DIR [--seeds 1 2 3]

DIR is the SFT model that `make quickstart` prints. Each seed is a `turnwise train` of its own, and its saved
model is scored by `turnwise eval` in a new process on 1,000 held-out maps at temperature 1. The run's own
last validation plays the same tasks, so the two figures must be equal.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import SMALL_RUN, parse_arguments

from turnwise.report.intervals import wilson_interval
from turnwise.tracking.jsonl import read_metrics

CONFIG = Path(__file__).parent.parent / "examples" / "frozen_lake" / "agentic.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sft-model", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--maps", type=int, default=1000, help="held-out maps of each score")
    parser.add_argument("--work", default="runs/benchmark_quickstart")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "quickstart.json"))
    parser.add_argument("overrides", nargs="*")
    options = parse_arguments(parser, seeds=[1], maps=4, overrides=SMALL_RUN)
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    seeds = [run_seed(seed, work, options) for seed in options.seeds]
    successes = sum(row["after_rl"]["num_successes"] for row in seeds)
    episodes = sum(row["after_rl"]["num_episodes"] for row in seeds)
    result = {
        "pooled_success": successes / episodes,
        "pooled_interval": wilson_interval(successes, episodes),
        "seeds": seeds,
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
        "overrides": options.overrides,
        "machine": describe_machine(),
    }
    Path(options.out).parent.mkdir(exist_ok=True)
    Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "seeds"}, indent=2))


def run_seed(seed: int, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Trains with one seed and scores the model before and after."""
    common = [
        str(CONFIG),
        *options.overrides,
        f"seed={seed}",
        f"pretrain={options.sft_model}",
        f"val_batch_size={options.maps}",
    ]
    before = score(work / f"sft_{seed}.json", common)
    started = time.perf_counter()
    turnwise("train", *common, f"output_dir={work}", f"exp_name=seed_{seed}")
    train_s = time.perf_counter() - started
    run = max((work / f"seed_{seed}").iterdir())
    model = max(
        (run / "checkpoints").iterdir(), key=lambda folder: int(folder.name.removeprefix("checkpoint-"))
    )
    after = score(work / f"rl_{seed}.json", [*common, "--model", str(model)])
    rows = read_metrics(run / "metrics.jsonl")
    curve = [
        (row["step"], row["val/env/FrozenLake/success"])
        for row in rows
        if "val/env/FrozenLake/success" in row
    ]
    print(f"seed {seed}: {before['success']:.3f} → {after['success']:.3f} in {train_s:.0f} s", flush=True)
    return {
        "seed": seed,
        "after_sft": before,
        "after_rl": after,
        "last_validation_in_training": curve[-1][1],
        "validation_curve": curve,
        "train_s": round(train_s, 1),
    }


def score(file: Path, arguments: list[str]) -> dict[str, Any]:
    turnwise("eval", *arguments, "--json", str(file))
    overall: dict[str, Any] = json.loads(file.read_text())["overall"]
    return overall


def turnwise(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "turnwise.cli.main", *arguments], check=True)


if __name__ == "__main__":
    main()
