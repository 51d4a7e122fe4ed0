"""`turnwise sft CONFIG [KEY=VALUE ...]`."""

from __future__ import annotations

import argparse

from turnwise.build.prepare import row_problems
from turnwise.cli.options import read_config
from turnwise.config import SFTConfig
from turnwise.pipelines.interrupt import ends_at_once


def run(options: argparse.Namespace) -> int:
    """Trains on demonstrations and prints the place of the model."""
    config = read_config(options, SFTConfig, row_problems)
    with ends_at_once():
        from turnwise.build.sft import fine_tune
    fine_tune(config, is_quiet=options.quiet)
    return 0
