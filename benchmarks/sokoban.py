"""What reinforcement learning adds on Sokoban, 6×6 with one box, over one fixed SFT checkpoint.

    python benchmarks/sokoban.py --sft-model DIR [--seeds 1 2 3] [KEY=VALUE ...]

DIR is the `sft_model` that `python examples/sokoban/recipe.py` makes. Each seed is a `turnwise train` of its
own; both models are scored by `turnwise eval`, each in a new process, on the same 1,000 held-out rooms at
temperature 1. What is there already isn't run again, and a run that was interrupted is resumed.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
from pathlib import Path
from typing import Any

from algorithms import EXAMPLES, NUM_TASKS, curves, score, turnwise
from machine import describe_machine
from toy import SMALL_RUN, parse_arguments

from turnwise.config import AgenticConfig, load_config
from turnwise.envs.sokoban.room import random_room
from turnwise.rollout.tasks import SeededTasks
from turnwise.types import Split

CONFIG = EXAMPLES / "sokoban" / "agentic.yaml"
TAG = "Sokoban"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sft-model", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--tasks", type=int, default=NUM_TASKS, help="held-out rooms of each score")
    parser.add_argument("--work", default="runs/benchmark_sokoban")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "sokoban.json"))
    parser.add_argument("overrides", nargs="*")
    options = parse_arguments(parser, tasks=4, overrides=SMALL_RUN)
    rows = []
    for seed in options.seeds:
        rows.append(run(seed, options))
        result = {
            "runs": rows,
            "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
            "overrides": options.overrides,
            "machine": describe_machine(),
        }
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
        print(
            json.dumps({key: value for key, value in rows[-1].items() if key != "curve"}, indent=1),
            flush=True,
        )


def run(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains with one seed and scores the model before and after."""
    work = Path(options.work)
    name = f"seed_{seed}"
    common = [str(CONFIG), *options.overrides, f"seed={seed}", f"pretrain={options.sft_model}"]
    before = score(work / f"sft_{seed}.json", common, options.sft_model, options.tasks)
    finished = work / f"rl_{seed}.json"
    if not finished.exists():
        places = [f"output_dir={work}", f"exp_name={name}", "save_steps=20", "resume_from_checkpoint=true"]
        turnwise("train", *common, *places)
    folder = max(path.parent for path in (work / name).glob("*/metrics.jsonl"))
    model = max(
        (folder / "checkpoints").glob("checkpoint-*"),
        key=lambda path: int(path.name.removeprefix("checkpoint-")),
    )
    after = score(finished, common, str(model), options.tasks)
    return {
        "seed": seed,
        "revision": json.loads((folder / "environment.json").read_text())["git_revision"],
        "after_sft": before,
        "after_rl": after,
        "gain": difference(after, before),
        "rooms": rooms(seed, options),
        **curves(folder, TAG),
    }


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """The difference of two shares with the 95% interval that follows from theirs (Newcombe 1998, method 10).

    Both models play the same rooms; the interval makes no use of that and is rather too wide.
    """
    gain = after["success"] - before["success"]
    below = math.hypot(after["success"] - after["low"], before["high"] - before["success"])
    above = math.hypot(after["high"] - after["success"], before["success"] - before["low"])
    return {"success": round(gain, 4), "low": round(gain - below, 4), "high": round(gain + above, 4)}


def rooms(seed: int, options: argparse.Namespace) -> dict[str, int]:
    """How many different rooms the held-out tasks are, and how many of their layouts the run trains on."""
    config, _ = load_config(
        CONFIG, [*options.overrides, f"seed={seed}", f"pretrain={options.sft_model}"], AgenticConfig
    )
    env_config = config.custom_envs[TAG].env_config
    size = (tuple(env_config["dim_room"]), env_config["num_boxes"])

    def drawn(split: Split, num_tasks: int) -> list[Any]:
        manager = config.env_manager(split)
        source = SeededTasks(seed, split, tuple(manager.tags), tuple(manager.num_groups_partition))
        return [random_room(source.task(index).seed, *size, split=split) for index in range(num_tasks)]

    held_out = drawn("val", options.tasks)
    trained = {
        layout for layout, _ in drawn("train", config.max_steps * config.train_env_manager.num_env_groups)
    }
    return {
        "held_out": len(set(held_out)),
        "held_out_layouts": len({layout for layout, _ in held_out}),
        "held_out_layouts_in_training": len(trained & {layout for layout, _ in held_out}),
        "training_layouts": len(trained),
    }


if __name__ == "__main__":
    main()
