"""`turnwise train CONFIG [KEY=VALUE ...]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from turnwise.cli.applied_table import shown
from turnwise.config import AgenticConfig, load_config, require, unavailable
from turnwise.errors import DataError


def run(options: argparse.Namespace) -> int:
    """Trains, draws the learning curve, and says where everything is."""
    config, notes = load_config(options.config, options.overrides, AgenticConfig, strict=options.strict)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    # Before torch is imported: what can't run here should be said at once.
    require(unavailable(config))
    rollouts = Path(options.from_rollouts) if options.from_rollouts else None
    if rollouts is not None and not rollouts.is_file():
        raise DataError(f"--from-rollouts {rollouts}: there is no such file; `turnwise rollout` and every run write one")
    train(config, is_quiet=options.quiet, rollouts=rollouts)
    return 0


def train(config: AgenticConfig, is_quiet: bool = False, rollouts: Path | None = None) -> dict[str, str]:
    """Runs the pipeline of a config, on its own rollouts or on those of a file; returns where the run, its model and its curve
    are."""
    from turnwise.pipelines.build import build_agentic
    from turnwise.pipelines.build_run import start_run
    from turnwise.pipelines.session import run_to_end
    from turnwise.report.curve import learning_curve
    from turnwise.tracking.jsonl import read_metrics

    folder = start_run(config)
    if not is_quiet:
        print(f"run folder: {folder.path}", flush=True)
    pipeline = run_to_end(folder, lambda: shown(build_agentic(config, folder, is_quiet, rollouts), is_quiet))
    places = {"run": str(folder.path), "curve": str(folder.curve), "tensorboard": str(folder.tensorboard)}
    model = pipeline.checkpoints.newest
    if model is not None:
        places["model"] = str(model)
        print(f"model: {model}")
    learning_curve(read_metrics(folder.metrics), folder.curve, config.exp_name)
    print(f"learning curve: {folder.curve}")
    return places
