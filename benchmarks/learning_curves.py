"""Every estimator learns from random weights: each of three turns names a kind of character and wants one of
it.

    python benchmarks/learning_curves.py [--estimators grpo gae] [--seeds 1 2 3] [--steps 80]

Draws `docs/images/learning_curves.png`, a panel an estimator with one line a seed, and writes the scores
beside the other results. What the file has isn't run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import describe_machine
from toy import parse_arguments

from turnwise.assemble.agentic import build_agentic
from turnwise.assemble.run import start_run
from turnwise.config import AgenticConfig, parse_config
from turnwise.examine.examined import examine
from turnwise.lifecycle.session import run_to_end
from turnwise.models.make import make_model
from turnwise.spec import ESTIMATORS
from turnwise.tracking.jsonl import read_metrics

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "support"))  # toy_envs
NUM_TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS), choices=ESTIMATORS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "learning_curves.json")
    parser.add_argument(
        "--picture", type=Path, default=HERE.parent / "docs" / "images" / "learning_curves.png"
    )
    options = parse_arguments(parser, estimators=["grpo", "gae"], seeds=[1], steps=3)
    curves: dict[str, dict[str, list[float]]] = (
        json.loads(options.out.read_text())["scores"] if options.out.is_file() else {}
    )
    with tempfile.TemporaryDirectory() as work:
        model = make_model("tiny", Path(work) / "model", ["l u d"], seed=0).folder
        for name in options.estimators:
            for seed in options.seeds:
                own = curves.setdefault(name, {})
                if str(seed) not in own:
                    own[str(seed)] = train(name, seed, options.steps, model, Path(work))
                    print(
                        f"{name}, seed {seed}: {own[str(seed)][0]:.2f} → {own[str(seed)][-1]:.2f}", flush=True
                    )
                    result = {"machine": describe_machine(), "scores": curves}
                    options.out.write_text(json.dumps(result) + "\n")
    draw(curves, options.picture)


def train(estimator: str, seed: int, steps: int, model: Path, work: Path) -> list[float]:
    """The mean score of each step's rollouts."""
    groups = (
        {"num_env_groups": 64, "group_size": 1}
        if estimator == "gae"
        else {"num_env_groups": 8, "group_size": 8}
    )
    trained = {"training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 64}}
    values: dict[str, Any] = {
        "exp_name": f"{estimator}_{seed}",
        "seed": seed,
        "pretrain": str(model),
        "output_dir": str(work),
        "adv_estimator": estimator,
        "entropy_loss_coef": 0.01,
        "max_steps": steps,
        "save_steps": 0,
        "rollout_batch_size": 64,
        "sequence_length": 128,
        "track_with": [],
        "actor_train": trained,
        "train_env_manager": groups,
        "custom_envs": {
            "Kinds": {
                "env_type": "toy_envs:KindsEnv",
                "env_config": {"num_turns": NUM_TURNS},
                "max_steps": NUM_TURNS,
                "max_tokens_per_step": 1,
                "agent_system_template": "",
                "agent_template": "{observation}",
                "action_pattern": None,
            }
        },
    }
    if estimator == "gae":
        values |= {
            "critic": trained,
            "critic_warmup": 2,
            "gae_granularity": "turn",
            "whiten_advantages": True,
        }
    config, _ = parse_config(values, AgenticConfig)
    folder = start_run(config)
    run_to_end(folder, lambda: build_agentic(examine(config), folder, is_quiet=True))
    return [
        round(row["rollout/score/mean"], 4)
        for row in read_metrics(folder.metrics)
        if "rollout/score/mean" in row
    ]


def draw(curves: dict[str, dict[str, Sequence[float]]], picture: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_columns = 4
    num_rows = -(-len(curves) // num_columns)
    figure = Figure(figsize=(2.4 * num_columns, 1.9 * num_rows))
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, (name, of_seeds) in zip(panels, curves.items(), strict=False):
        for scores in of_seeds.values():
            axes.plot(range(1, len(scores) + 1), scores, color="#08519c", linewidth=1.2, alpha=0.7)
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0, 1.02)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean score of the rollouts", fontsize=9)
    figure.tight_layout()
    figure.savefig(picture, dpi=130, format="png")


if __name__ == "__main__":
    main()
