"""`turnwise train CONFIG [KEY=VALUE ...]`."""

from __future__ import annotations

import argparse
import sys

from turnwise.config import AgenticConfig, load_config, require, unavailable


def run(options: argparse.Namespace) -> int:
    """Trains, draws the learning curve, and says where everything is."""
    config, notes = load_config(options.config, options.overrides, AgenticConfig, strict=options.strict)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    # Before torch is imported: what can't run here should be said at once.
    require(unavailable(config))
    train(config)
    return 0


def train(config: AgenticConfig) -> dict[str, str]:
    """Runs the pipeline of a config; returns where the run, its model and its curve are."""
    from turnwise.pipelines.build import build_agentic, start_run
    from turnwise.report.curve import learning_curve
    from turnwise.tracking.jsonl import read_metrics

    folder = start_run(config)
    print(f"run folder: {folder.path}", flush=True)
    pipeline = build_agentic(config, folder)
    try:
        pipeline.run()
    finally:
        pipeline.close()
    learning_curve(read_metrics(folder.metrics), folder.curve, config.exp_name)
    places = {"run": str(folder.path), "curve": str(folder.curve), "tensorboard": str(folder.tensorboard)}
    saved = pipeline.checkpoints.all()
    if saved:
        places["model"] = str(saved[-1])
        print(f"model: {saved[-1]}")
    print(f"learning curve: {folder.curve}")
    return places
