"""`turnwise sft CONFIG [KEY=VALUE ...]`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from turnwise.build.prepare import row_problems
from turnwise.cli.applied_table import shown
from turnwise.config import SFTConfig, load_config
from turnwise.pipelines.interrupt import ends_at_once


def run(options: argparse.Namespace) -> int:
    """Trains on demonstrations and says where the model is."""
    config, notes = load_config(options.config, options.overrides, SFTConfig, strict=options.strict, examine=row_problems)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    with ends_at_once():
        import_module("turnwise.build.sft")
    fine_tune(config, is_quiet=options.quiet)
    return 0


def fine_tune(config: SFTConfig, is_quiet: bool = False) -> Path:
    """Runs the pipeline of a config; returns the folder of the model."""
    from turnwise.build.run import start_run
    from turnwise.build.sft import build_sft
    from turnwise.pipelines.session import run_to_end
    from turnwise.report.curve import learning_curve
    from turnwise.tracking.jsonl import read_metrics

    folder = start_run(config)
    if not is_quiet:
        print(f"run folder: {folder.path}", flush=True)
    pipeline = run_to_end(folder, lambda: shown(build_sft(config, folder, is_quiet), is_quiet))
    model = pipeline.checkpoints.newest
    assert model is not None, "a run that ends well saves after its last step"
    print(f"model: {model}")
    learning_curve(read_metrics(folder.metrics), folder.curve, config.exp_name)
    print(f"learning curve: {folder.curve}")
    return model
