"""`turnwise sft CONFIG [KEY=VALUE ...]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from turnwise.config import SFTConfig, load_config


def run(options: argparse.Namespace) -> int:
    """Trains on demonstrations and says where the model is."""
    config, notes = load_config(options.config, options.overrides, SFTConfig, strict=options.strict)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    fine_tune(config)
    return 0


def fine_tune(config: SFTConfig) -> Path:
    """Runs the pipeline of a config; returns the folder of the model."""
    from turnwise.pipelines.build import build_sft, start_run

    folder = start_run(config)
    print(f"run folder: {folder.path}", flush=True)
    pipeline = build_sft(config, folder)
    try:
        pipeline.run()
    finally:
        pipeline.close()
    model = pipeline.checkpoints.all()[-1]
    print(f"model: {model}")
    return model
