"""`turnwise sft CONFIG [KEY=VALUE ...]`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from turnwise.build.prepare import row_problems
from turnwise.config import SFTConfig, load_config
from turnwise.pipelines.interrupt import ends_at_once


def run(options: argparse.Namespace) -> int:
    """Trains on demonstrations and prints the place of the model."""
    config, notes = load_config(options.config, options.overrides, SFTConfig, strict=options.strict, examine=row_problems)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    with ends_at_once():
        import_module("turnwise.build.sft")
    fine_tune(config, is_quiet=options.quiet)
    return 0


def fine_tune(config: SFTConfig, is_quiet: bool = False) -> Path:
    """Runs the pipeline of a config; returns the folder of the model."""
    from turnwise.build.sft import build_sft
    from turnwise.build.whole_run import whole_run

    with whole_run(config, lambda folder: build_sft(config, folder, is_quiet), is_quiet) as pipeline:
        pipeline.run()
    model = pipeline.checkpoints.newest
    assert model is not None, "a run that ends well saves after its last step"
    return model
